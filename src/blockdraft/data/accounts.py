"""What the texts of a table hold, counted by source while they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from blockdraft.data.mixture import place
from blockdraft.data.vocabulary import COVERAGE_SIZES, choose_vocabulary, coverage


@dataclass
class SourceCounts:
    """Counts over the texts of one source."""

    examples: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    sides: Counter[str] = field(default_factory=Counter)

    def add(self, row: dict[str, Any], train_ratio: float) -> None:
        """Count a row of the table."""
        self.examples += 1
        self.tokens["source"] += len(row["source_ids"] or [])
        self.tokens["text"] += len(row["input_ids"])
        self.tokens["learned"] += sum(row["targets"][1::2]) - sum(row["targets"][::2])
        self.finish[row["finish"]] += 1
        self.sides["train" if place(row["key"]) < train_ratio else "validation"] += 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "documents": self.examples,
            "tokens": {name: self.tokens[name] for name in ("source", "text", "learned")},
            "finish": dict(sorted(self.finish.items())),
            "train": self.sides["train"],
            "validation": self.sides["validation"],
        }


class Accounts:
    """Counts of every source and how often each token is supervised."""

    def __init__(self, sources: Iterable[str], train_ratio: float) -> None:
        self._train_ratio = train_ratio
        self._sources = {name: SourceCounts() for name in sources}
        self._frequencies = np.zeros(0, dtype=np.int64)

    def counting(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same rows, counted as they go by."""
        for row in rows:
            self._sources[row["source"]].add(row, self._train_ratio)
            for start, end in zip(row["targets"][::2], row["targets"][1::2], strict=True):
                self._count(row["input_ids"][start:end])
            yield row

    def _count(self, tokens: list[int]) -> None:
        room = max(tokens) + 1 - len(self._frequencies)
        if room > 0:  # the vocabulary may be larger than the tokenizer
            self._frequencies = np.concatenate([self._frequencies, np.zeros(room, dtype=np.int64)])
        np.add.at(self._frequencies, tokens, 1)

    def of(self, source: str) -> dict[str, Any]:
        """Counts of one source."""
        return self._sources[source].to_dict()

    def totals(self) -> dict[str, Any]:
        """Texts on each side, and what share of the supervised tokens the most frequent ones are."""
        every = self._sources.values()
        counts = torch.from_numpy(self._frequencies)
        distinct = int((counts > 0).sum())
        sizes = [size for size in COVERAGE_SIZES if size < distinct]
        return {
            "documents": sum(counts.examples for counts in every),
            "train": sum(counts.sides["train"] for counts in every),
            "validation": sum(counts.sides["validation"] for counts in every),
            "distinct_tokens": distinct,
            "draft_vocabulary": {
                str(size): round(coverage(counts, choose_vocabulary(counts, size)), 5) for size in sizes
            },
        }
