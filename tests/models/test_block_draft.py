"""The draft: what it may see, packing, and that training and decoding are one computation."""

from __future__ import annotations

import itertools

import pytest
import torch

from blockdraft.data.packing import pack_row
from blockdraft.models.fusion import TapStatistics
from blockdraft.ops.anchors import Blocks, choose_anchors
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example, tiny_config, tiny_draft

GRID = list(itertools.product(["projected", "layerwise"], ["shared", "separate"], [True, False]))
VARIANTS = [
    {},
    {"windows": (9, None)},
    {"causal": (True, True)},
    {"windows": (12, 9), "causal": (False, True)},
]


def grid_config(fusion: str, kv: str, standardize: bool, **changes: object):
    return tiny_config(context_fusion=fusion, context_kv=kv, standardize_taps=standardize, **changes)


@pytest.mark.parametrize(("fusion", "kv", "standardize"), GRID)
def test_context_at_or_after_the_anchor_cannot_change_the_draft(
    tiny_verifier: CausalVerifier, fusion: str, kv: str, standardize: bool
) -> None:
    draft = tiny_draft(tiny_verifier, grid_config(fusion, kv, standardize))
    row = pack_row([random_example(30, 5, 1)])
    taps = tiny_verifier.states([row.tokens], draft.config.target_layer_ids)[0].taps.clone().requires_grad_()
    anchor = 12
    blocks = Blocks(torch.tensor([anchor, anchor + 3]), torch.tensor([0, 0]), torch.tensor([30, 30]))
    hidden = draft(taps, row.tokens, row.positions, blocks)
    (gradient,) = torch.autograd.grad(hidden[0].square().sum(), taps)
    moved = gradient.abs().sum(dim=(1, 2)) > 0
    assert moved[:anchor].all()
    assert not moved[anchor:].any()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("method", ["dflash", "dflare"])
def test_packed_equals_alone(tiny_verifier: CausalVerifier, method: str, variant: dict) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config(method, **variant))
    examples = [random_example(n, s, i) for i, (n, s) in enumerate([(13, 4), (40, 11), (9, 2)])]
    states = tiny_verifier.states([torch.tensor(d.input_ids) for d in examples], draft.config.target_layer_ids)
    row = pack_row(examples)
    blocks = choose_anchors(row.loss_mask, row.lengths, 0)
    packed = draft(torch.cat([s.taps for s in states]), row.tokens, row.positions, blocks)
    alone = []
    for example, own in zip(examples, states, strict=True):
        single = pack_row([example])
        anchors = choose_anchors(single.loss_mask, single.lengths, 0)
        alone.append(draft(own.taps, single.tokens, single.positions, anchors))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("method", ["dflash", "dflare"])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_decoding_computes_what_training_computes(
    tiny_verifier: CausalVerifier, method: str, variant: dict, block_size: int
) -> None:
    """One block after ragged contexts in the cache, against the packed forward with the same anchors."""
    draft = tiny_draft(tiny_verifier, tiny_config(method, **variant))
    examples = [random_example(n, 2, i) for i, n in enumerate((25, 14, 19))]
    anchors = [20, 7, 13]
    cache = draft.cache(3)
    states = tiny_verifier.states([torch.tensor(d.input_ids) for d in examples], draft.config.target_layer_ids)
    taps = torch.nn.utils.rnn.pad_sequence([s.taps for s in states], batch_first=True)
    # In two pieces, the first longer than what is kept of it: rejected positions must leave no trace.
    draft.extend_context(cache, taps[:, :9])
    cache.commit(torch.tensor([6, 4, 9]))
    rest = torch.stack([taps[r, p : p + 14] for r, p in enumerate((6, 4, 9))])
    draft.extend_context(cache, rest)
    cache.commit(torch.tensor([14, 3, 4]))
    ids = torch.tensor([d.input_ids[a] for d, a in zip(examples, anchors, strict=True)])
    draft.block_hidden(cache, ids.flip(0), 8)  # an earlier proposal that was thrown away
    decoded = draft.block_hidden(cache, ids, block_size)
    for index, (example, own, anchor) in enumerate(zip(examples, states, anchors, strict=True)):
        row = pack_row([example])
        blocks = Blocks(torch.tensor([anchor]), torch.tensor([0]), torch.tensor([len(example.input_ids)]))
        trained = draft(own.taps, row.tokens, row.positions, blocks, block_size)
        torch.testing.assert_close(decoded[index], trained[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_causality_inside_the_block_follows_the_flag(tiny_verifier: CausalVerifier, causal: bool) -> None:
    """The anchor's token reaches every slot; a later slot's position reaches an earlier one only without causality."""
    draft = tiny_draft(tiny_verifier, tiny_config(causal=(causal, causal)))
    row = pack_row([random_example(30, 5, 1)])
    taps = tiny_verifier.states([row.tokens], draft.config.target_layer_ids)[0].taps
    blocks = Blocks(torch.tensor([12]), torch.tensor([0]), torch.tensor([30]))
    whole = draft(taps, row.tokens, row.positions, blocks, 8)
    short = draft(taps, row.tokens, row.positions, blocks, 4)
    assert torch.allclose(whole[:, :4], short, atol=1e-5) == causal


def test_the_whole_head_is_rotated_and_distance_matters(tiny_verifier: CausalVerifier) -> None:
    """Every channel pair of a head turns: moving all positions changes nothing, moving the block does."""
    draft = tiny_draft(tiny_verifier, tiny_config())
    row = pack_row([random_example(20, 5, 1)])
    taps = tiny_verifier.states([row.tokens], draft.config.target_layer_ids)[0].taps
    blocks = Blocks(torch.tensor([10]), torch.tensor([0]), torch.tensor([20]))
    here = draft(taps, row.tokens, row.positions, blocks)
    shifted = draft(taps, row.tokens, row.positions + 50, blocks)
    torch.testing.assert_close(here, shifted, rtol=1e-3, atol=1e-4)
    moved = row.positions.clone()
    moved[10:] += 1
    assert not torch.allclose(here, draft(taps, row.tokens, moved, blocks), atol=1e-4)
    cos, _ = draft.positions(torch.tensor([3]), 8)
    assert cos.shape[-1] == 16 and bool((cos[0] != 1).all())


def test_folded_projection_equals_standardized_taps() -> None:
    generator = torch.Generator().manual_seed(0)
    taps = 3 + torch.randn(200, 3, 8, generator=generator, dtype=torch.float64) * torch.rand(3, 8, generator=generator)
    statistics = TapStatistics(3, 8).double()
    statistics.calibrate(taps)
    weight = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    standardized = (
        taps - (taps * statistics.direction).sum(-1, keepdim=True) * statistics.direction
    ) / statistics.scale
    torch.testing.assert_close(taps.flatten(1) @ statistics.fold(weight).T, standardized.flatten(1) @ weight.T)


def test_every_parameter_has_an_effect_and_a_gradient(tiny_verifier: CausalVerifier) -> None:
    for method in ("dflash", "dflare"):
        draft = tiny_draft(tiny_verifier, tiny_config(method))
        row = pack_row([random_example(30, 5, 1)])
        taps = tiny_verifier.states([row.tokens], draft.config.target_layer_ids)[0].taps
        blocks = choose_anchors(row.loss_mask, row.lengths, 0)
        draft(taps, row.tokens, row.positions, blocks).square().sum().backward()
        dead = [name for name, p in draft.named_parameters() if p.grad is None or not bool((p.grad != 0).any())]
        assert not dead


def test_rope_scaling_is_passed_on(tiny_verifier: CausalVerifier) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 7777.0, "factor": 4.0, "original_max_position_embeddings": 64}
    plain = tiny_draft(tiny_verifier, tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 7777.0}))
    scaled = tiny_draft(tiny_verifier, tiny_config(rope_parameters=yarn))
    there = torch.tensor([100])
    assert not torch.allclose(plain.positions(there, 128)[0], scaled.positions(there, 128)[0])


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_any_depth_gives_finite_states(tiny_verifier: CausalVerifier, num_layers: int) -> None:
    config = tiny_config(num_layers=num_layers, windows=(None,) * num_layers, causal=(False,) * num_layers)
    draft = tiny_draft(tiny_verifier, config)
    row = pack_row([random_example(12, 3, 1)])
    taps = tiny_verifier.states([row.tokens], config.target_layer_ids)[0].taps
    out = draft(taps, row.tokens, row.positions, choose_anchors(row.loss_mask, row.lengths, 0))
    assert bool(out.isfinite().all())
