"""The cache: what is written but not committed cannot persist."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.ops.prefix import shared_prefix
from blockdraft.ops.ragged_kv import GROWTH, RaggedKV


@given(
    steps=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=8),
    seed=st.integers(0, 3),
)
def test_behaves_like_one_list_a_row(steps: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = RaggedKV(1, 3, torch.device("cpu"))
    rows: list[list[float]] = [[], [], []]
    for counts in steps:
        new = torch.randn(3, 1, 4, 2, generator=generator)
        keys, values = cache.write(0, new, -new)
        for row in range(3):
            known = torch.tensor(rows[row])
            torch.testing.assert_close(keys[row, 0, : len(known), 0], known)
            torch.testing.assert_close(keys[row, 0, len(known) : len(known) + 4], new[row, 0])
            torch.testing.assert_close(values[row, 0, len(known) : len(known) + 4], -new[row, 0])
            rows[row] += new[row, 0, : counts[row], 0].tolist()
        cache.commit(torch.tensor(counts))
        assert cache.lengths.tolist() == [len(row) for row in rows]


def test_keeps_its_content_when_it_grows_and_when_rows_leave() -> None:
    cache = RaggedKV(1, 2, torch.device("cpu"))
    first = torch.randn(2, 1, GROWTH - 1, 2)
    cache.write(0, first, first)
    cache.commit(torch.tensor([GROWTH - 1, 3]))
    second = torch.randn(2, 1, 5, 2)
    keys, _ = cache.write(0, second, second)
    torch.testing.assert_close(keys[0, 0, : GROWTH - 1], first[0, 0])
    cache.commit(torch.tensor([5, 5]))
    cache.keep_rows(torch.tensor([1]))
    assert cache.longest == 8
    keys, _ = cache.write(0, second[:1], second[:1])
    torch.testing.assert_close(keys[0, 0, 3:8], second[1, 0])


def test_shared_prefix() -> None:
    long = torch.arange(100)
    other = torch.cat([torch.arange(50), torch.tensor([7, 7, 7])])
    assert shared_prefix([long, other]) == 50
    assert shared_prefix([long]) == 0
    assert shared_prefix([long[:10], long[:20]]) == 0  # too short to be worth it
    assert shared_prefix([long, long[:60]]) == 59  # something is left of each
