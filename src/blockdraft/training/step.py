"""One training step's forward pass: packed row -> anchors -> draft -> loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.data.packing import PackedRow
from blockdraft.losses.chunked import Correction, LossAndMetrics, chunked_head_loss
from blockdraft.losses.objective import Objective
from blockdraft.losses.targets import SlotTargets, Teacher
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.vocabulary import DraftVocabulary
from blockdraft.ops.anchors import Blocks
from blockdraft.training.hidden_states import ExampleStates


def positions_before(blocks: Blocks, k: int) -> tuple[Tensor, Tensor]:
    """The position before each proposal, and whether the proposal's own is inside the example, both [N, K].

    Proposal i is for position anchor + i + 1, whatever the slot it comes from. Outside, the anchor stands in.
    """
    anchors = blocks.anchors[:, None]
    before = anchors + torch.arange(k, device=anchors.device)
    inside = before + 1 < blocks.ends[:, None]
    return torch.where(inside, before, anchors), inside


def block_targets(greedy_T: Tensor, blocks: Blocks, k: int, vocabulary: DraftVocabulary | None = None) -> SlotTargets:
    """What each proposal should be: the verifier's own choice after the position before it.

    Args:
        greedy_T: the verifier's next token after every position of the row.
    """
    before, mask = positions_before(blocks, k)
    ids = torch.where(mask, greedy_T[before], 0)
    if vocabulary is None:
        return SlotTargets(ids, mask, mask)
    ids = vocabulary.to_draft(ids)
    return SlotTargets(ids.clamp_min(0), mask, mask & (ids >= 0))


def row_loss(
    draft: BlockDraft,
    row: PackedRow,
    states: Sequence[ExampleStates],
    blocks: Blocks,
    objective: Objective,
    softcap: float | None = None,
    supervised: int | None = None,
    whole_head_VE: Tensor | None = None,
) -> LossAndMetrics:
    """Loss and metrics of the blocks of a packed row whose examples have the given states.

    Computed on the device of draft and states; row and blocks may be anywhere.

    Args:
        softcap: the verifier's, for objectives that learn its distribution.
        supervised: supervised slots of the whole step, of which this row is a part; None: of this row.
        whole_head_VE: the verifier's, with which a confidence head over a reduced vocabulary learns what the verifier
            accepts, and not what it would if it had no other tokens either.
    """
    taps = torch.cat([state.taps for state in states])
    greedy = torch.cat([state.greedy for state in states])
    # Rows are packed and anchors drawn on the CPU, where they come out the same for every device.
    tokens, positions, blocks = row.tokens.to(taps.device), row.positions.to(taps.device), blocks.to(taps.device)
    # A slot that proposes nothing has no loss and is not projected.
    hidden = draft.predicted(draft(taps, tokens, positions, blocks))
    assert draft.head_VE is not None
    before, _ = positions_before(blocks, hidden.shape[1])
    targets = block_targets(greedy, blocks, hidden.shape[1], draft.vocabulary)
    targets = dataclasses.replace(targets, supervised=supervised)
    if objective.needs_teacher:
        final = torch.cat([state.final for state in states if state.final is not None])
        whole = whole_head_VE if draft.vocabulary is not None and draft.confidence is not None else None
        targets = dataclasses.replace(targets, teacher=Teacher(final, before, draft.head_VE, softcap, whole))
    previous = tokens[before]
    correction = None
    if draft.sequential is not None:
        features = draft.sequential.teacher_forced(hidden, previous)
        correction = Correction(features, draft.sequential.markov_w2.weight)
    wanted = draft.confidence is not None
    outcome = chunked_head_loss(hidden, draft.head_VE, targets, objective, correction, with_overlap=wanted)
    confidence = draft.confidence_logits(hidden, previous)
    if confidence is None:
        return outcome
    extra = objective.confidence_loss(confidence, outcome.overlap_NK, targets)
    metrics = outcome.metrics.with_confidence(confidence.sigmoid(), outcome.overlap_NK, targets.mask_NK)
    return LossAndMetrics(outcome.loss + extra, metrics, outcome.overlap_NK)
