"""One training step's forward pass: packed row -> anchors -> draft -> loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.data.packing import PackedRow
from blockdraft.losses.chunked import LossAndMetrics, chunked_head_loss
from blockdraft.losses.objective import Objective
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.anchors import Blocks
from blockdraft.training.states import DocumentStates


def block_targets(greedy_T: Tensor, blocks: Blocks, block_size: int) -> tuple[Tensor, Tensor]:
    """What slots 1 .. B-1 of each block should predict, and which of them are supervised, both [N, B-1].

    Slot k stands at anchor + k; its target is the verifier's own choice after position anchor + k - 1. Slots behind
    the end of the anchor's document have none.
    """
    slots = torch.arange(1, block_size, device=blocks.anchors.device)
    positions = blocks.anchors[:, None] + slots
    mask = positions < blocks.ends[:, None]
    previous = torch.where(mask, positions - 1, 0)
    return torch.where(mask, greedy_T[previous], 0), mask


def row_loss(
    draft: BlockDraft, row: PackedRow, states: Sequence[DocumentStates], blocks: Blocks, objective: Objective
) -> LossAndMetrics:
    """Loss and metrics of the blocks of a packed row whose documents have the given states."""
    taps = torch.cat([state.taps for state in states])
    greedy = torch.cat([state.greedy for state in states])
    device = taps.device
    hidden = draft(taps, row.tokens.to(device), row.positions.to(device), blocks)
    targets, mask = block_targets(greedy, blocks, draft.config.block_size)
    assert draft.head_VE is not None
    # Slot 0 is the anchor, whose token is known: it has no loss and is not projected.
    return chunked_head_loss(hidden[:, 1:], draft.head_VE, targets, mask, objective)
