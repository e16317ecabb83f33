"""Packing: every document once an epoch, positions restarting, rows not longer than asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.packing import pack_row, packed_order
from conftest import random_document


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 3), st.integers(0, 3))
def test_every_document_once_and_rows_within_the_limit(lengths: list[int], seed: int, epoch: int) -> None:
    rows = packed_order(lengths, 40, seed, epoch)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= 40 for row in rows)
    assert rows == packed_order(lengths, 40, seed, epoch)


def test_epochs_and_seeds_shuffle_differently() -> None:
    lengths = [10] * 30
    assert packed_order(lengths, 40, 0, 0) != packed_order(lengths, 40, 0, 1) != packed_order(lengths, 40, 1, 1)


def test_row_tensors() -> None:
    row = pack_row([random_document(4, 2, 0), random_document(3, 1, 1)])
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert row.lengths.tolist() == [4, 3]
