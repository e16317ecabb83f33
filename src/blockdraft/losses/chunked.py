"""Head and loss in chunks of blocks, so that [slots, vocabulary] logits never exist whole.

The verifier's head is frozen: all that is needed back is the gradient of the hidden states (and of a sequential
head's correction). It is computed in the forward pass, chunk by chunk, while the chunk's logits are at hand: two
products with the head in place of the four of recomputation, and memory that grows with the chunk. Slots without a
loss are not projected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.losses.metrics import BlockMetrics
from blockdraft.losses.objective import Objective
from blockdraft.losses.pointwise import slot_losses
from blockdraft.losses.targets import Distributions, SlotTargets, Teacher

# Two sizes. A product with the head reads all of the head, whatever the number of rows:
# it needs some hundred rows to come near the CPU's rate. A softmax passes over its rows several times: it wants
# them in cache. So one buffer holds the logits of a chunk, and losses work their way through it in small steps.
CHUNK_BYTES = 96 * 2**20
CHUNK_SLOTS = (256, 512)  # at least and at most
STEP_BYTES = 16 * 2**20  # float32 logits that a loss works on at a time


def chunk_slots(vocab_size: int, itemsize: int) -> int:
    """Slots whose logits exist at once."""
    least, most = CHUNK_SLOTS
    return max(least, min(most, CHUNK_BYTES // (itemsize * vocab_size)))


@dataclass(frozen=True, slots=True)
class Correction:
    """A sequential head's bias on the logits: features_NKR times weight_VR transposed."""

    features_NKR: Tensor
    weight_VR: Tensor


@dataclass(frozen=True, slots=True)
class LossAndMetrics:
    """`loss` is differentiable in hidden states and correction.

    `overlap_NK` is each supervised slot's overlap of draft and verifier (`pointwise.SlotLosses`), else 0; a constant.
    """

    loss: Tensor
    metrics: BlockMetrics
    overlap_NK: Tensor


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NKD: Tensor,
        features_NKR: Tensor | None,
        weight_VR: Tensor | None,
        head_VD: Tensor,
        targets: SlotTargets,
        objective: Objective,
        with_overlap: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        projected = projected_slots(targets, objective, with_overlap)
        exact = torch.float64 if hidden_NKD.dtype == torch.float64 else torch.float32
        grad_hidden = torch.zeros_like(hidden_NKD)
        correction = None
        if features_NKR is not None and weight_VR is not None:
            correction = _CorrectionPass(features_NKR, weight_VR, exact)
        counts = projected.sum(dim=1)
        chunks = _runs(counts, chunk_slots(len(head_VD), head_VD.element_size()))
        room = max((int(counts[part].sum()) for part in chunks), default=0)
        buffer = head_VD.new_empty(room, len(head_VD))
        run = _Run(targets, objective, projected, with_overlap, exact)
        for part in chunks:
            live = projected[part]
            logits = torch.mm(hidden_NKD[part][live], head_VD.T, out=buffer[: int(counts[part].sum())])
            if correction is not None:
                correction.correct(logits, part, live)
            run.logits_to_gradients(part, logits)
            grad_hidden[part][live] = torch.mm(logits, head_VD)
            if correction is not None:
                correction.add_gradients(logits, part, live)
        ctx.grads = (grad_hidden, *((None, None) if correction is None else correction.gradients))
        ctx.weight_dtype = None if weight_VR is None else weight_VR.dtype
        ctx.mark_non_differentiable(run.predicted, run.overlap)
        return run.total, run.predicted, run.overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, features, weight = (None if grad is None else grad * grads[0].to(grad.dtype) for grad in ctx.grads)
        weight = None if weight is None else weight.to(ctx.weight_dtype)
        return hidden, features, weight, None, None, None, None


class _CorrectionPass:
    """A sequential head's part in the pass over all chunks."""

    def __init__(self, features_NKR: Tensor, weight_VR: Tensor, exact: torch.dtype) -> None:
        self.features_NKR, self.weight_VR = features_NKR, weight_VR
        self.gradients = (torch.zeros_like(features_NKR), torch.zeros_like(weight_VR, dtype=exact))

    def correct(self, logits: Tensor, part: slice, live: Tensor) -> None:
        """Add the bias to the logits of a chunk's projected slots."""
        logits.addmm_(self.features_NKR[part][live], self.weight_VR.T)

    def add_gradients(self, grad_logits: Tensor, part: slice, live: Tensor) -> None:
        """Add what the gradients of a chunk's logits make of those of features and weight."""
        grad_features, grad_weight = self.gradients
        grad_features[part][live] = torch.mm(grad_logits, self.weight_VR)
        grad_weight += torch.mm(grad_logits.T, self.features_NKR[part][live])


@dataclass(frozen=True, slots=True)
class _ChunkTeacher:
    """The verifier's side of a chunk. Neighboring blocks predict the same positions: each is projected once.

    Attributes:
        raw_UV: logits at the chunk's positions, as `Teacher.raw_logits` gives them.
        log_sums_U: of the whole vocabulary, where the overlap is wanted and the vocabulary is reduced.
        where_R: the row of `raw_UV` that each projected slot has.
    """

    teacher: Teacher
    raw_UV: Tensor
    log_sums_U: Tensor | None
    where_R: Tensor

    @classmethod
    def at(cls, positions_R: Tensor, teacher: Teacher, with_overlap: bool) -> _ChunkTeacher:
        positions_U, where_R = positions_R.unique(return_inverse=True)
        log_sums_U = teacher.log_sums(positions_U) if with_overlap else None
        return cls(teacher, teacher.raw_logits(positions_U), log_sums_U, where_R)

    def distributions(self, rows: slice) -> Distributions:
        """The verifier's distributions at some of the chunk's slots."""
        needed, again = self.where_R[rows].unique(return_inverse=True)
        log_sums = None if self.log_sums_U is None else self.log_sums_U[needed]
        return self.teacher.distributions(self.raw_UV[needed], log_sums)[again]


class _Run:
    """One pass over all chunks: what it adds up, and how logits turn into gradients."""

    def __init__(
        self, targets: SlotTargets, objective: Objective, projected: Tensor, with_overlap: bool, exact: torch.dtype
    ) -> None:
        self.targets, self.objective, self.with_overlap, self.exact = targets, objective, with_overlap, exact
        self.projected_NK = projected
        ids = targets.ids_NK
        self.scale = targets.scale()
        self.total = torch.zeros((), device=ids.device, dtype=exact)
        self.predicted = torch.full_like(ids, -1)
        self.overlap = torch.zeros(ids.shape, device=ids.device, dtype=exact)

    def logits_to_gradients(self, part: slice, logits_RV: Tensor) -> None:
        """Losses of a chunk's projected slots; their logits are overwritten by the gradient of the total."""
        teacher = self._teacher(part)
        counts = self.projected_NK[part].sum(dim=1)
        row = 0
        for inner in _runs(counts, max(1, STEP_BYTES // (4 * logits_RV.shape[1]))):
            size = int(counts[inner].sum())
            rows = slice(row, row + size)
            blocks = slice(part.start + inner.start, part.start + inner.stop)
            verifier = None if teacher is None else teacher.distributions(rows)
            logits_RV[rows] = self._gradient(blocks, logits_RV[rows].to(self.exact), verifier)
            row += size

    def _teacher(self, part: slice) -> _ChunkTeacher | None:
        """The verifier's side of a chunk; None where no loss needs it."""
        if not self.objective.needs_teacher:
            return None
        teacher = self.targets.teacher
        assert teacher is not None
        positions = teacher.positions_NK[part][self.projected_NK[part]]
        return _ChunkTeacher.at(positions, teacher, self.with_overlap)

    def _gradient(self, blocks: slice, logits: Tensor, verifier: Distributions | None) -> Tensor:
        live = self.projected_NK[blocks]
        slots = slot_losses(
            self.objective.terms, logits, self.targets.ids_NK[blocks][live], verifier, self.with_overlap
        )
        confidence = torch.zeros(live.shape, device=live.device, dtype=self.exact)
        confidence[live] = slots.log_target.exp()
        weights = self.objective.weights(confidence, self.targets[blocks])[live] * self.scale
        self.total += (weights * slots.values).sum()
        self.predicted[blocks][live] = slots.predicted
        if slots.overlap is not None:
            self.overlap[blocks][live] = slots.overlap
        return slots.gradient.mul_(weights[:, None])


def _runs(counts_N: Tensor, most: int) -> list[slice]:
    """Runs of blocks with at most `most` slots in all (or a single block); empty runs are left out.

    Blocks are never cut, since a slot's weight may depend on its whole block.
    """
    runs: list[slice] = []
    first, slots = 0, 0
    for index, count in enumerate(counts_N.tolist()):
        if slots and slots + count > most:
            runs.append(slice(first, index))
            first, slots = index, 0
        slots += count
    if slots:
        runs.append(slice(first, len(counts_N)))
    return runs


def projected_slots(targets: SlotTargets, objective: Objective, with_overlap: bool) -> Tensor:
    """Slots whose logits are needed, bool [N, K].

    Those with a loss; and where the overlap with the verifier's distribution is wanted, also those whose target a
    reduced vocabulary lacks: the verifier may still accept another token there.
    """
    return targets.mask_NK if with_overlap and objective.needs_teacher else targets.in_vocabulary_NK


def chunked_head_loss(
    hidden_NKD: Tensor,
    head_VD: Tensor,
    targets: SlotTargets,
    objective: Objective,
    correction: Correction | None = None,
    with_overlap: bool = True,
) -> LossAndMetrics:
    """Loss of predicted slots through a frozen head.

    Args:
        hidden_NKD: hidden states of the predicted slots, after the draft's final norm.
        head_VD: the verifier's output head (its rows for the draft's vocabulary); the product runs in its dtype.
        with_overlap: whether the overlap of draft and verifier is wanted where no loss needs it.
    """
    features = weight = None
    if correction is not None:
        features, weight = correction.features_NKR.to(head_VD.dtype), correction.weight_VR.to(head_VD.dtype)
    with torch.autocast(hidden_NKD.device.type, enabled=False):
        loss, predicted, overlap = _ChunkedHeadLoss.apply(
            hidden_NKD.to(head_VD.dtype), features, weight, head_VD, targets, objective, with_overlap
        )
    return LossAndMetrics(loss, BlockMetrics.of(predicted, targets), overlap)
