"""Which tokens a reduced draft vocabulary keeps: those that the supervised text uses most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from blockdraft.records import Example

COVERAGE_SIZES = (8_000, 16_000, 32_000, 64_000, 128_000)  # of reduced vocabularies, as they are usually chosen


def token_counts(examples: Iterable[Example], vocab_size: int) -> Tensor:
    """How often each token is supervised (part of a target), int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        counts += torch.bincount(torch.tensor(example.supervised), minlength=vocab_size)
    return counts


def occurring_tokens(examples: Iterable[Example]) -> set[int]:
    """Every token that stands anywhere in the examples."""
    seen: set[int] = set()
    for example in examples:
        seen.update(example.input_ids)
    return seen


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending; ties go to the smaller id.

    Where fewer tokens occur, the smallest ids that do not occur fill up: the result depends on the counts alone.
    """
    order = counts.argsort(descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that are kept: no position can be right more often than this."""
    return float(counts[ids].sum() / counts.sum().clamp_min(1))
