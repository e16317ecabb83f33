"""Packing: every example once an epoch, positions restarting, rows not longer than asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.packing import pack_row, packed_order
from blockdraft.errors import InputError
from blockdraft.ops.anchors import choose_anchors
from blockdraft.records import Example
from conftest import random_example


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(0, 3), st.integers(0, 3))
def test_every_example_once_and_rows_within_the_limit(lengths: list[int], seed: int, epoch: int) -> None:
    rows = packed_order(lengths, 40, seed, epoch)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or sum(lengths[i] for i in row) <= 40 for row in rows)
    assert rows == packed_order(lengths, 40, seed, epoch)


def test_epochs_and_seeds_shuffle_differently() -> None:
    lengths = [10] * 30
    assert packed_order(lengths, 40, 0, 0) != packed_order(lengths, 40, 0, 1) != packed_order(lengths, 40, 1, 1)


def test_row_tensors() -> None:
    row = pack_row([random_example(4, 2, 0), random_example(3, 1, 1)])
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert row.lengths.tolist() == [4, 3]


def test_several_targets_and_what_lies_between_them() -> None:
    turns = Example("two", list(range(10, 20)), ((2, 4), (6, 9)), "stop")
    row = pack_row([random_example(3, 1, 0), turns])
    assert row.loss_mask.nonzero()[:, 0].tolist() == [1, 2, 5, 6, 9, 10, 11]
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    # An anchor needs a supervised successor, and a block ends with the reply it stands in, not with the text.
    assert blocks.anchors.tolist() == [1, 5, 9, 10]
    assert blocks.ends.tolist() == [3, 7, 12, 12]
    assert blocks.starts.tolist() == [0, 3, 3, 3]


@pytest.mark.parametrize("targets", [(), ((0, 2),), ((2, 2),), ((2, 4), (4, 6)), ((5, 6), (2, 3)), ((8, 11),)])
def test_targets_that_no_text_can_have_are_refused(targets: tuple) -> None:
    with pytest.raises(InputError, match="example bad: targets"):
        Example("bad", list(range(10)), targets, "stop")
