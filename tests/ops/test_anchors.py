"""Anchors: who may be one, and that every example gets its share."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.packing import pack_row
from blockdraft.ops.anchors import anchor_candidates, choose_anchors
from conftest import random_example


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    cap=st.integers(0, 50),
    seed=st.integers(0, 5),
)
def test_anchors_are_supervised_distinct_sorted_and_have_a_successor(lengths: list[int], cap: int, seed: int) -> None:
    examples = [random_example(length, 1 + i % (length - 1), i) for i, length in enumerate(lengths)]
    row = pack_row(examples)
    blocks = choose_anchors(row.loss_mask, row.lengths, cap, torch.Generator().manual_seed(seed))
    anchors = blocks.anchors.tolist()
    assert anchors == sorted(set(anchors))
    assert all(row.loss_mask[a] and row.loss_mask[a + 1] for a in anchors)
    assert all(
        s <= a and a + 1 < e for a, s, e in zip(anchors, blocks.starts.tolist(), blocks.ends.tolist(), strict=True)
    )
    possible = sum(max(0, len(d.supervised) - 1) for d in examples)
    assert len(blocks) == (min(cap, possible) if cap else possible)


def test_short_examples_are_not_starved_by_a_long_one() -> None:
    examples = [random_example(20, 2, 0), random_example(20, 2, 1), random_example(2000, 2, 2)]
    row = pack_row(examples)
    blocks = choose_anchors(row.loss_mask, row.lengths, 64, torch.Generator().manual_seed(0))
    counts = [int((blocks.starts == start).sum()) for start in (0, 20, 40)]
    assert sum(counts) == 64
    assert counts[0] >= 1 and counts[1] >= 1


def test_more_examples_than_anchors_gives_one_each_to_the_largest() -> None:
    examples = [random_example(5 + i, 2, i) for i in range(6)]
    row = pack_row(examples)
    blocks = choose_anchors(row.loss_mask, row.lengths, 3, torch.Generator().manual_seed(0))
    assert len(blocks) == 3
    assert len(set(blocks.starts.tolist())) == 3
    assert int(blocks.starts.min()) == 5 + 6 + 7


def test_the_last_token_of_an_example_is_no_anchor_though_the_next_example_goes_on() -> None:
    row = pack_row([random_example(6, 2, 0), random_example(6, 1, 1)])
    example_T = torch.tensor([0] * 6 + [1] * 6)
    candidates = anchor_candidates(row.loss_mask, example_T).tolist()
    assert 5 not in candidates and 11 not in candidates
    assert candidates == [2, 3, 4, 7, 8, 9, 10]


def test_draws_follow_the_seed() -> None:
    row = pack_row([random_example(200, 2, 0)])

    def draw(seed: int) -> list[int]:
        return choose_anchors(row.loss_mask, row.lengths, 20, torch.Generator().manual_seed(seed)).anchors.tolist()

    assert draw(1) == draw(1) != draw(2)
