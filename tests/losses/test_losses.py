"""Objective and chunked head against plain versions, values and gradients."""

from __future__ import annotations

import pytest
import torch

from blockdraft.losses import chunked
from blockdraft.losses.objective import BlockMetrics, Objective
from blockdraft.losses.weights import dpace, fixed_exp_decay

OBJECTIVES = [Objective("dpace", 0.5, 4.0), Objective("dpace", 1.0, 4.0), Objective("fixed-exp-decay", 0.5, 4.0)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 63, 65])
@pytest.mark.parametrize("masking", ["all", "ragged", "none"])
def test_chunked_head_equals_plain(
    objective: Objective, num_blocks: int, masking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "SMALLEST_CHUNK", 30)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 0)
    generator = torch.Generator().manual_seed(num_blocks)
    hidden = torch.randn(num_blocks, 7, 16, generator=generator, dtype=torch.float64)
    head = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(50, (num_blocks, 7), generator=generator)
    mask = torch.ones(num_blocks, 7, dtype=torch.bool)
    if masking == "ragged":
        mask = torch.arange(7) < torch.randint(0, 8, (num_blocks, 1), generator=generator)
    elif masking == "none":
        mask[:] = False
    results = []
    for function in (chunked.chunked_head_loss, chunked.plain_head_loss):
        leaf = hidden.clone().requires_grad_()
        outcome = function(leaf, head, targets, mask, objective)
        (3 * outcome.loss).backward()
        results.append((outcome.loss.detach().float(), leaf.grad, outcome.metrics))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)
    for name in ("slots", "correct", "accepted", "blocks"):
        assert torch.equal(getattr(results[0][2], name), getattr(results[1][2], name))


def test_normalisation_is_by_supervised_slots_whatever_the_chunk() -> None:
    objective = Objective("fixed-exp-decay", 0.5, 1e9)  # all weights one: the loss is the mean cross entropy
    hidden, head = torch.randn(5, 7, 16), torch.randn(50, 16)
    targets, mask = torch.randint(50, (5, 7)), torch.rand(5, 7) < 0.5
    outcome = chunked.chunked_head_loss(hidden, head, targets, mask, objective)
    wanted = torch.nn.functional.cross_entropy((hidden @ head.T)[mask], targets[mask])
    torch.testing.assert_close(outcome.loss, wanted)


def test_dpace_by_its_formula() -> None:
    ce = torch.tensor([[0.1, 2.0, 0.5, 3.0]])
    mask = torch.tensor([[1, 1, 0, 1]])
    s = [0.5 * torch.exp(-ce[0, k]).item() + 0.5 if mask[0, k] else 1.0 for k in range(4)]
    c = [s[0], s[0] * s[1], s[0] * s[1] * s[2], s[0] * s[1] * s[2] * s[3]]
    wanted = [sum(c[m] for m in range(k, 4) if mask[0, m]) * mask[0, k].item() for k in range(4)]
    torch.testing.assert_close(dpace(ce, mask, 0.5)[0], torch.tensor(wanted))


def test_fixed_weights_fall_by_e_over_gamma_slots() -> None:
    weights = fixed_exp_decay(torch.ones(1, 9), 4.0)[0]
    assert float(weights[0]) == 1.0
    torch.testing.assert_close(weights[8], torch.exp(torch.tensor(-2.0)))


def test_metrics_form_the_run_inside_the_block() -> None:
    predicted = torch.tensor([[1, 2, 9], [9, 2, 3], [1, 2, 3]])
    targets = torch.tensor([[1, 2, 3]] * 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    figures = BlockMetrics.of(predicted, targets, mask).figures()
    assert figures["block_length"] == pytest.approx(1 + (2 + 0 + 1) / 3)
    assert figures["accuracy"] == pytest.approx(5 / 7)
    assert figures["accuracy_position_2"] == 1.0
