"""Draws, duplicates and the split follow from content and seed alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.conversations import content_digest
from blockdraft.data.mixture import first_occurrences, place, ranks, wanted_counts
from blockdraft.data.sources import Source
from blockdraft.errors import InputError

KEYS = [content_digest(i) for i in range(2000)]


@given(st.lists(st.integers(0, 20), max_size=60))
def test_first_occurrences(values: list[int]) -> None:
    keys = [content_digest(value) for value in values]
    seen: set[int] = set()
    wanted = [not (value in seen or seen.add(value)) for value in values]
    assert first_occurrences(keys).tolist() == wanted


def test_the_split_is_stable_and_of_the_asked_size() -> None:
    train = [key for key in KEYS if place(key) < 0.9]
    assert 0.87 < len(train) / len(KEYS) < 0.93
    more = [key for key in [content_digest(i) for i in range(-500, 2000)] if place(key) < 0.9]
    assert set(train) <= set(more)


def test_the_order_follows_the_seed_and_not_the_place() -> None:
    one, again, other = (ranks(KEYS, seed) for seed in (42, 42, 43))
    assert (one == again).all() and (one != other).mean() > 0.99
    assert (ranks(KEYS[::-1], 42) == one[::-1]).all()
    assert len(set(one.tolist())) == len(KEYS)


def sources(*amounts: int | float | None) -> list[Source]:
    whole = [amount if isinstance(amount, int) else None for amount in amounts]
    share = [amount if isinstance(amount, float) else None for amount in amounts]
    return [Source(str(i), "x", None, n, w) for i, (n, w) in enumerate(zip(whole, share, strict=True))]


@pytest.mark.parametrize(
    ("amounts", "available", "num_rows", "wanted"),
    [
        ((None, None), [10, 30], 0, [10, 30]),  # all there is
        ((None, None), [10, 30], 20, [5, 15]),  # in proportion to what is there
        ((10, 20), [50, 50], 0, [10, 20]),
        ((10, None), [50, 50], 0, [10, 50]),
        ((10, None), [50, 50], 40, [10, 30]),
        ((0.5, 0.5), [50, 50], 21, [11, 10]),
        ((0.25, 0.75), [1000, 30], 0, [10, 30]),  # the scarcest source decides
        ((20, 0.5, 0.5), [50, 50, 50], 40, [20, 10, 10]),
    ],
)
def test_counts_and_weights(amounts: tuple, available: list[int], num_rows: int, wanted: list[int]) -> None:
    assert wanted_counts(sources(*amounts), available, num_rows) == wanted


@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(6, 300))
def test_weights_share_every_row(weights: list[int], num_rows: int) -> None:
    counts = wanted_counts(sources(*(weight / 100 for weight in weights)), [10_000] * len(weights), num_rows)
    assert sum(counts) == num_rows
    assert all(abs(c - num_rows * w / sum(weights)) < 1 for c, w in zip(counts, weights, strict=True))


@pytest.mark.parametrize(
    ("amounts", "available", "num_rows", "hint"),
    [
        ((30,), [20], 0, "30 rows asked for, 20 usable"),
        ((0.5, None), [9, 9], 0, "neither a count nor a weight"),
        ((10, None), [20, 20], 10, "leaves no row"),
        ((0.5, 0.5), [100, 5], 50, "25 rows asked for, 5 usable"),
    ],
)
def test_what_cannot_be_had_is_refused(amounts: tuple, available: list[int], num_rows: int, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        wanted_counts(sources(*amounts), available, num_rows)


def test_every_source_is_in_a_capped_mixture() -> None:
    """Ten rows of two sources of ten: both are there, and the same ones for the same seed."""
    counts = wanted_counts(sources(None, None), [10, 10], 10)
    assert counts == [5, 5]
    order = ranks([content_digest(f"{s}{i}") for s in "ab" for i in range(10)], 1).argsort()
    assert len(Counter("ab"[i // 10] for i in order[:10])) == 2
