"""Covering arrays: few combinations of settings in which every allowed pair, triple, ... of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

Row = tuple[Hashable, ...]
Interaction = frozenset[tuple[int, Hashable]]


def interactions(row: Row, strength: int) -> set[Interaction]:
    """All sets of `strength` settings of a row, each setting as its column and value."""
    return {frozenset(chosen) for chosen in itertools.combinations(enumerate(row), strength)}


def covering_array(allowed: Sequence[Row], strength: int) -> list[Row]:
    """Some of the allowed rows, in which all interactions of all of them occur.

    Greedy: the row that adds the most comes next, the earlier one of equals, so that the same rows give the same array.
    Since only allowed rows are chosen from, a forbidden pair of values is neither wanted nor made.
    """
    adds = {row: interactions(row, strength) for row in allowed}
    missing = set().union(*adds.values())
    chosen = []
    while missing:
        best = max(allowed, key=lambda row: len(adds[row] & missing))
        chosen.append(best)
        missing -= adds[best]
    return chosen
