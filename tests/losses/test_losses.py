"""Objectives and the chunked head against plain versions in float64, values and gradients."""

from __future__ import annotations

import json

import pytest
import torch

from blockdraft.errors import InputError
from blockdraft.losses import chunked
from blockdraft.losses import targets as targets_module
from blockdraft.losses.chunked import Correction, chunked_head_loss
from blockdraft.losses.metrics import BlockMetrics
from blockdraft.losses.objective import Objective, parse_loss
from blockdraft.losses.plain import plain_head_loss
from blockdraft.losses.pointwise import LOSSES
from blockdraft.losses.targets import SlotTargets, Teacher
from blockdraft.losses.weights import dpace, exp_decay

SLOTS, HIDDEN, VOCAB, RANK = 7, 16, 50, 4
OBJECTIVES = [
    Objective({"ce": 1.0}, "dpace"),
    Objective({"ce": 1.0}, "dpace", dpace_alpha=1.0),
    *(Objective({name: 0.7}, "fixed-exp-decay") for name in LOSSES),
    Objective({"ce": 0.1, "tv": 0.9}, "fixed-exp-decay"),
    Objective(dict.fromkeys(LOSSES, 0.3), "progressive-decay", progress=0.5, decay_gamma_end=9.0),
]


def random_targets(
    num_blocks: int, masking: str, generator: torch.Generator, softcap: float | None, whole: bool = False
) -> SlotTargets:
    mask = torch.ones(num_blocks, SLOTS, dtype=torch.bool)
    if masking == "ragged":
        mask = torch.arange(SLOTS) < torch.randint(0, SLOTS + 1, (num_blocks, 1), generator=generator)
    elif masking == "none":
        mask[:] = False
    in_vocabulary = mask & (torch.rand(num_blocks, SLOTS, generator=generator) < 0.8) if masking == "ragged" else mask
    teacher = Teacher(
        final_TE=torch.randn(40, HIDDEN, generator=generator, dtype=torch.float64),
        positions_NK=torch.randint(40, (num_blocks, SLOTS), generator=generator),
        head_VE=torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64),
        softcap=softcap,
        whole_head_VE=torch.randn(3 * VOCAB, HIDDEN, generator=generator, dtype=torch.float64) if whole else None,
    )
    ids = torch.randint(VOCAB, (num_blocks, SLOTS), generator=generator)
    return SlotTargets(ids, mask, in_vocabulary, teacher)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("num_blocks", [0, 1, 7, 63, 65])
@pytest.mark.parametrize(
    ("masking", "softcap", "corrected"), [("all", None, False), ("ragged", 5.0, True), ("none", None, True)]
)
def test_chunked_head_equals_plain(
    objective: Objective,
    num_blocks: int,
    masking: str,
    softcap: float | None,
    corrected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_SLOTS", (30, 30))
    monkeypatch.setattr(chunked, "STEP_BYTES", 9 * 4 * VOCAB)
    generator = torch.Generator().manual_seed(num_blocks)
    inputs = {
        "hidden": torch.randn(num_blocks, SLOTS, HIDDEN, generator=generator, dtype=torch.float64),
        "features": torch.randn(num_blocks, SLOTS, RANK, generator=generator, dtype=torch.float64),
        "weight": torch.randn(VOCAB, RANK, generator=generator, dtype=torch.float64),
    }
    targets = random_targets(num_blocks, masking, generator, softcap, whole=masking == "ragged")
    assert targets.teacher is not None
    monkeypatch.setattr(targets_module, "HEAD_ROWS", 70)
    head = targets.teacher.head_VE
    results = []
    for function in (chunked_head_loss, plain_head_loss):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        correction = Correction(leaves["features"], leaves["weight"]) if corrected else None
        outcome = function(leaves["hidden"], head, targets, objective, correction)
        (3 * outcome.loss).backward()
        grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        results.append((outcome, grads))
    (fast, fast_grads), (plain, plain_grads) = results
    torch.testing.assert_close(fast.loss, plain.loss)
    assert len(fast_grads) == len(plain_grads) == (3 if corrected else 1)
    for got, wanted in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(fast.overlap_NK, plain.overlap_NK)
    for name in ("slots", "covered", "correct", "accepted", "blocks"):
        assert torch.equal(getattr(fast.metrics, name), getattr(plain.metrics, name))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("ce", "nla", "lk_hybrid")])
def test_a_draft_that_is_the_verifier_loses_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = random_targets(5, "all", generator, None)
    assert targets.teacher is not None
    hidden = targets.teacher.final_TE[targets.teacher.positions_NK].requires_grad_()
    outcome = chunked_head_loss(hidden, targets.teacher.head_VE, targets, Objective({name: 1.0}, "fixed-exp-decay"))
    torch.testing.assert_close(outcome.loss, torch.zeros((), dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(outcome.overlap_NK, torch.ones(5, SLOTS, dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("far", [60.0, 300.0])
def test_far_apart_distributions_stay_finite(name: str, far: float) -> None:
    """float32, where probabilities vanish: a mistake of hundreds of nats must not become NaN."""
    head = torch.eye(4)
    teacher = Teacher(far * torch.eye(4)[:1], torch.zeros(1, 1, dtype=torch.int64), head, None)
    ones = torch.ones(1, 1, dtype=torch.bool)
    targets = SlotTargets(torch.zeros(1, 1, dtype=torch.int64), ones, ones, teacher)
    hidden = (far * torch.eye(4)[None, 1:2]).requires_grad_()
    outcome = chunked_head_loss(hidden, head, targets, Objective({name: 1.0}, "fixed-exp-decay"))
    outcome.loss.backward()
    assert bool(outcome.loss.isfinite()) and hidden.grad is not None and bool(hidden.grad.isfinite().all())


def test_normalisation_is_by_supervised_slots_whatever_the_chunk() -> None:
    objective = Objective({"ce": 1.0}, "fixed-exp-decay", decay_gamma=1e9)  # all weights one: the mean cross entropy
    hidden, head = torch.randn(5, 7, 16), torch.randn(50, 16)
    ids, mask = torch.randint(50, (5, 7)), torch.rand(5, 7) < 0.5
    outcome = chunked_head_loss(hidden, head, SlotTargets(ids, mask, mask), objective)
    wanted = torch.nn.functional.cross_entropy((hidden @ head.T)[mask], ids[mask])
    torch.testing.assert_close(outcome.loss, wanted)


def test_dpace_by_its_formula() -> None:
    ce = torch.tensor([[0.1, 2.0, 0.5, 3.0]])
    mask = torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)
    s = [0.5 * torch.exp(-ce[0, k]).item() + 0.5 if mask[0, k] else 1.0 for k in range(4)]
    c = [s[0], s[0] * s[1], s[0] * s[1] * s[2], s[0] * s[1] * s[2] * s[3]]
    wanted = [sum(c[m] for m in range(k, 4) if mask[0, m]) * mask[0, k].item() for k in range(4)]
    torch.testing.assert_close(dpace(torch.exp(-ce), mask, 0.5)[0], torch.tensor(wanted))


def test_what_the_draft_cannot_say_ends_the_block_for_dpace_and_earns_nothing() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    in_vocabulary = torch.tensor([[True, False, True, True]])
    targets = SlotTargets(torch.zeros(1, 4, dtype=torch.int64), mask, in_vocabulary)
    confident = torch.where(in_vocabulary, 1.0, 0.0)
    weights = Objective({"ce": 1.0}, "dpace", dpace_alpha=0.25).weights(confident, targets)[0]
    torch.testing.assert_close(weights, torch.tensor([1 + 3 * 0.25, 0.0, 2 * 0.25, 0.25]))


def test_fixed_and_progressive_weights() -> None:
    ones = torch.ones(1, 9, dtype=torch.bool)
    weights = exp_decay(ones, 4.0)[0]
    assert float(weights[0]) == 1.0
    torch.testing.assert_close(weights[8], torch.exp(torch.tensor(-2.0)))
    growing = Objective({"ce": 1.0}, "progressive-decay", decay_gamma=4.5, decay_gamma_end=10.5)
    targets = SlotTargets(torch.zeros(1, 9, dtype=torch.int64), ones, ones)
    for progress, gamma in ((0.0, 4.5), (0.5, 7.5), (1.0, 10.5)):
        got = growing.at(progress).weights(torch.ones(1, 9), targets)
        torch.testing.assert_close(got, exp_decay(ones, gamma))


def test_confidence_learns_the_overlap() -> None:
    overlap = torch.tensor([[0.9, 0.2, 0.5]])
    ones = torch.ones(1, 3, dtype=torch.bool)
    targets = SlotTargets(torch.zeros(1, 3, dtype=torch.int64), ones, ones)
    objective = Objective({"ce": 1.0}, "dpace", confidence_alpha=2.0)
    logits = torch.logit(overlap).requires_grad_()
    objective.confidence_loss(logits, overlap, targets).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(1, 3), atol=1e-6, rtol=0)
    low = torch.full((1, 3), -20.0, requires_grad=True)
    objective.confidence_loss(low, overlap, targets).backward()
    assert low.grad is not None
    torch.testing.assert_close(low.grad, -2 / 3 * overlap * exp_decay(ones, 4.0))


def test_loss_names_and_weights() -> None:
    assert parse_loss("ce") == {"ce": 1.0}
    assert parse_loss("kl_div") == {"kl": 1.0}
    assert parse_loss(json.dumps({"ce": 0.1, "tv": 0.9})) == {"ce": 0.1, "tv": 0.9}
    for wrong in ("", "hinge", "{", "{}", '{"ce": 0}', '{"ce": "1"}', '{"ce": true}'):
        with pytest.raises(InputError, match="--loss-fn"):
            parse_loss(wrong)
    for terms in ({"kl": 1.0}, {"ce": 0.1, "tv": 0.9}):
        with pytest.raises(InputError, match="dpace"):
            Objective(terms, "dpace")


def test_metrics_form_the_run_inside_the_block() -> None:
    predicted = torch.tensor([[1, 2, 9], [9, 2, 3], [1, 2, 3]])
    ids = torch.tensor([[1, 2, 3]] * 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    figures = BlockMetrics.of(predicted, SlotTargets(ids, mask, mask)).figures()
    assert figures["block_length"] == pytest.approx(1 + (2 + 0 + 1) / 3)
    assert figures["accuracy"] == pytest.approx(5 / 7)
    assert figures["accuracy_position_2"] == 1.0
    assert "coverage" not in figures


def test_confidence_figures_are_means_over_supervised_slots() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    mask = torch.tensor([[True, True, False]])
    counts = BlockMetrics.of(ids, SlotTargets(ids, mask, mask))
    assert "overlap" not in counts.figures()
    overlap = torch.tensor([[0.8, 0.4, 0.0]])
    one = counts.with_confidence(torch.tensor([[0.5, 0.5, 0.9]]), overlap, mask)
    figures = (one + one).figures()
    assert figures["overlap"] == pytest.approx(0.6)
    assert figures["confidence_abs_error"] == pytest.approx(0.2)


def test_what_the_draft_cannot_say_counts_as_wrong() -> None:
    predicted = ids = torch.tensor([[0, 0, 1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    in_vocabulary = torch.tensor([[True, False, True]])
    figures = BlockMetrics.of(predicted, SlotTargets(ids, mask, in_vocabulary)).figures()
    assert figures["accuracy"] == pytest.approx(2 / 3) == figures["coverage"]
    assert figures["accuracy_in_draft_vocabulary"] == 1.0
    assert figures["block_length"] == 2.0
