"""Packing examples into rows, and a row's tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.records import Example


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Examples end to end.

    Attributes:
        tokens: int64 [T].
        positions: position within the own example, int64 [T].
        loss_mask: True on supervised tokens, bool [T].
        lengths: tokens of each example, int64.
    """

    tokens: Tensor
    positions: Tensor
    loss_mask: Tensor
    lengths: Tensor


def pack_row(examples: Sequence[Example]) -> PackedRow:
    """Lay examples end to end; positions restart at each."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    tokens = torch.tensor([token for example in examples for token in example.input_ids])
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    loss_mask = torch.zeros(len(tokens), dtype=torch.bool)
    for offset, example in zip((lengths.cumsum(0) - lengths).tolist(), examples, strict=True):
        for start, end in example.targets:
            loss_mask[offset + start : offset + end] = True
    return PackedRow(tokens, positions, loss_mask, lengths)


def packed_order(lengths: Sequence[int], total_seq_len: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of example indices for one epoch: shuffled by seed and epoch, filled first-fit up to `total_seq_len`.

    The order depends on nothing else, so that a resumed run finds the same rows. An example longer than a row gets
    a row to itself.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    rows: list[list[int]] = []
    room: list[int] = []
    open_from = 0
    for index in order:
        row = next((r for r in range(open_from, len(rows)) if room[r] >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(total_seq_len)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
        open_from = max(0, len(rows) - 16)  # look back a few rows only: linear time, and order stays nearly random
    return rows
