"""The work of `blockdraft prepare`: read, draw, encode, write.

Every source is read once and its usable rows are put on disk; which of them are taken follows from digests; those are
encoded in several processes, and more where some turn out unusable, until every count is met.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockdraft.data.accounts import Accounts
from blockdraft.data.candidates import Candidates, Rejects, collect, overlapping_questions
from blockdraft.data.conversations import RowError
from blockdraft.data.encoding import FEATURES, Encoder
from blockdraft.data.mixture import first_occurrences, ranks, wanted_counts
from blockdraft.data.sources import Source
from blockdraft.data.table import REJECTS, TABLE, write_rows
from blockdraft.digests import digest_of, file_digest
from blockdraft.errors import InputError
from blockdraft.progress import progress
from blockdraft.settings import PrepareSettings

_BATCH, _SLICE, _FEW = 64, 20_000, 2_000  # rows of a call, of a map, and too few to start processes for
_WRITTEN = 1_000  # rows fetched and written at a time


@dataclass
class _Taken:
    """What was encoded of a source.

    Attributes:
        parts: data sets with encoded texts.
        where: a row for each candidate that is taken, in the order of the draw: candidate, part, first text, texts.
    """

    candidates: Candidates
    parts: list[Any] = field(default_factory=list)
    where: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.where)


class Preparation:
    """One run of `blockdraft prepare` in a folder."""

    def __init__(self, settings: PrepareSettings, sources: Sequence[Source], encoder: Encoder, folder: Path) -> None:
        self.settings, self.sources, self.encoder, self.folder = settings, sources, encoder, folder
        self.scratch = folder / "scratch"

    def run(self) -> dict[str, Any]:
        """Write table and rejects; returns what became of every row."""
        self.scratch.mkdir()
        with (self.folder / REJECTS).open("w", encoding="utf-8") as handle:
            self.rejects = Rejects(handle)
            every = self._without_duplicates(self._collected())
            taken = self._taken(every)
        record = self._write(taken)
        shutil.rmtree(self.scratch)
        return record

    def sample(self, amount: int) -> list[tuple[Source, list[dict[str, Any]]]]:
        """The first texts of each source in the order of the draw."""
        self.scratch.mkdir()
        with (self.folder / REJECTS).open("w", encoding="utf-8") as handle:
            self.rejects = Rejects(handle)
            found = []
            for candidates in self._without_duplicates(self._collected()):
                taken = _Taken(candidates)
                self._encode(taken, min(amount, len(candidates.kept)))
                texts = [taken.parts[p][first + i] for _, p, first, n in taken.where.tolist() for i in range(n)]
                found.append((candidates.source, texts[:amount]))
        return found

    def _collected(self) -> list[Candidates]:
        excluded = overlapping_questions([Source("excluded", str(path)) for path in self.settings.exclude_overlap])
        every = []
        for index, source in enumerate(self.sources):
            with progress(f"reading {source.name}", 0) as advance:
                path = self.scratch / f"{index}.arrow"
                found = collect(source, path, self.rejects, self.settings.prompts_only, excluded, advance)
            self._judge(source, found.read)
            if not len(found.kept):
                reasons = ", ".join(self.rejects.of(source)) or ("overlap" if found.contents else "it is empty")
                raise InputError("--source", source.name, f"no usable row ({reasons})")
            every.append(found)
        return every

    def _judge(self, source: Source, read: int) -> None:
        """Stop when too many rows of a source cannot be used."""
        counts = self.rejects.of(source)
        bad = sum(counts.values())
        if bad > self.settings.max_reject_share * read:
            reasons = ", ".join(f"{reason} {n}" for reason, n in counts.most_common(3))
            hint = "fix the rows"
            if counts.most_common(1)[0][0] == "duplicate id":
                hint = "give each row an id of its own, or leave the column out"
            raise InputError(
                "--source",
                source.name,
                f"{bad} of its {read} rows cannot be used ({reasons}); {hint}, or raise --max-reject-share "
                f"({self.settings.max_reject_share:g})",
            )

    def _without_duplicates(self, every: list[Candidates]) -> list[Candidates]:
        """Of rows with the same content, the first source's first one stays."""
        first = first_occurrences(key for candidates in every for key in candidates.contents)
        kept, at = [], 0
        for candidates in every:
            own = first[at : at + len(candidates.contents)]
            at += len(candidates.contents)
            left = candidates.kept[own[candidates.kept]]
            dropped = {**candidates.dropped, "duplicate": len(candidates.kept) - len(left)}
            kept.append(
                Candidates(
                    candidates.source, candidates.path, candidates.read, candidates.contents, candidates.keys, left,
                    dropped,
                )
            )  # fmt: skip
        return kept

    def _taken(self, every: list[Candidates]) -> list[_Taken]:
        taken = [_Taken(candidates) for candidates in every]
        # Without a total, weights follow what is usable in the end, so that everything must be encoded first.
        open_end = not self.settings.num_rows and any(source.weight for source in self.sources)
        available = [len(candidates.kept) for candidates in every]
        if open_end:
            for each, amount in zip(taken, available, strict=True):
                self._encode(each, amount, exact=False)
            available = [len(each) for each in taken]
        counts = wanted_counts(self.sources, available, self.settings.num_rows)
        for each, source, count in zip(taken, self.sources, counts, strict=True):
            if not open_end:
                # A source that gives all it has gives what turns out usable.
                self._encode(each, count, exact=bool(source.count or source.weight or self.settings.num_rows))
            each.where = each.where[:count]
        return taken

    def _encode(self, taken: _Taken, count: int, exact: bool = True) -> None:
        """Encode candidates in the order of the draw until `count` of them are usable."""
        candidates = taken.candidates
        order = candidates.kept[
            np.argsort(
                ranks((candidates.contents[i] for i in candidates.kept), self.settings.seed), kind="stable"
            )
        ]  # fmt: skip
        at = 0
        with progress(f"encoding {candidates.source.name}", count) as advance:
            while len(taken) < count and at < len(order):
                rows = order[at : at + min(_SLICE, count - len(taken))]
                at += len(rows)
                self._encode_rows(taken, rows)
                advance(len(rows))
        self._judge(candidates.source, candidates.read)
        if exact and len(taken) < count:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.rejects.of(candidates.source).most_common(3))
            raise InputError(
                "--source", candidates.source.name, f"{count} rows asked for, {len(taken)} usable ({reasons})"
            )
        if not len(taken):
            raise InputError(
                "--source", candidates.source.name, f"no usable row ({', '.join(self.rejects.of(candidates.source))})"
            )

    def _encode_rows(self, taken: _Taken, rows: np.ndarray) -> None:
        stored = _opened(taken.candidates.path)
        part = self._map(stored.select(rows), f"{taken.candidates.path.stem}-{len(taken.parts)}")
        number = len(taken.parts)
        taken.parts.append(part)
        rejected = np.array([reason is not None for reason in part["reason"]], dtype=bool)
        lines = stored.with_format("arrow")
        for bad in _fetched(part, np.flatnonzero(rejected).tolist()):
            line = lines[int(rows[bad["row"]])]["line"][0].as_py()
            self.rejects.add(taken.candidates.source, line, RowError(bad["reason"], bad["detail"]))
        texts = np.flatnonzero(~rejected)
        own, first, count = np.unique(np.asarray(part["row"])[texts], return_index=True, return_counts=True)
        fresh = np.stack([rows[own], np.full(len(own), number), texts[first], count], axis=1)
        taken.where = np.concatenate([taken.where, fresh])

    def _map(self, rows: Any, name: str) -> Any:
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features(
            {
                key: datasets.List(datasets.Value(kind[0])) if isinstance(kind, list) else datasets.Value(kind)
                for key, kind in FEATURES.items()
            }
        )
        workers = self.settings.num_workers or os.cpu_count() or 1
        workers = 1 if len(rows) < _FEW else workers
        with _one_thread_each(workers):
            return rows.map(
                self.encoder,
                with_indices=True,
                batched=True,
                batch_size=_BATCH,
                num_proc=workers if workers > 1 else None,
                remove_columns=rows.column_names,
                features=features,
                cache_file_name=str(self.scratch / f"{name}.texts.arrow"),
                load_from_cache_file=False,
                new_fingerprint=digest_of(name),
            )

    def _write(self, taken: list[_Taken]) -> dict[str, Any]:
        """The table in its final order, and the counts."""
        names = [each.candidates.source.name for each in taken]
        accounts = Accounts(names, self.settings.train_data_ratio)
        cuts = {name: Counter[str]() for name in names}
        sources = np.repeat(np.arange(len(taken)), [len(each) for each in taken])
        places = np.stack([sources, np.concatenate([np.arange(len(each)) for each in taken])], axis=1)
        contents = (each.candidates.contents[row] for each in taken for row in each.where[:, 0])
        order = np.argsort(ranks(contents, self.settings.seed), kind="stable")

        def rows() -> Iterator[dict[str, Any]]:
            with progress("writing", len(order)) as advance:
                for first in range(0, len(order), _WRITTEN):
                    chosen = places[order[first : first + _WRITTEN]].tolist()
                    yield from self._final_rows(taken, chosen, cuts)
                    advance(len(chosen))

        write_rows(self.folder / TABLE, accounts.counting(rows()))
        return {
            "sources": {
                each.candidates.source.name: self._account(each)
                | accounts.of(each.candidates.source.name)
                | {"cut": dict(cuts[each.candidates.source.name])}
                for each in taken
            },
            **accounts.totals(),
            "digest": file_digest(self.folder / TABLE, TABLE),
        }

    def _final_rows(
        self, taken: list[_Taken], chosen: list[list[int]], cuts: dict[str, Counter[str]]
    ) -> Iterator[dict[str, Any]]:
        """Rows of the table for (source, place in its draw), in this order; what was cut from them goes into `cuts`."""
        texts: dict[tuple[int, int], list[dict[str, Any]]] = {}
        stored: dict[tuple[int, int], dict[str, Any]] = {}
        for number, each in enumerate(taken):
            places = [place for source, place in chosen if source == number]
            where = each.where[places].tolist()
            rows = _fetched(_opened(each.candidates.path), [candidate for candidate, *_ in where])
            stored |= {(number, place): row for place, row in zip(places, rows, strict=True)}
            for part, encoded in enumerate(each.parts):
                wanted = [
                    (place, text)
                    for place, (_, own, first, count) in zip(places, where, strict=True)
                    if own == part
                    for text in range(first, first + count)
                ]
                for (place, _), row in zip(wanted, _fetched(encoded, [text for _, text in wanted]), strict=True):
                    texts.setdefault((number, place), []).append(row)
        for number, place in chosen:
            candidates = taken[number].candidates
            for index, text in enumerate(texts[number, place]):
                _count_cuts(cuts[candidates.source.name], text)
                yield {
                    "id": stored[number, place]["id"],
                    "part": index,
                    "source": candidates.source.name,
                    "key": candidates.keys[int(taken[number].where[place, 0])],
                    "conversation": None if index else stored[number, place]["conversation"],
                    **{name: text[name] for name in ("source_ids", "input_ids", "targets", "finish")},
                }

    def _account(self, taken: _Taken) -> dict[str, Any]:
        """What became of a source's rows: read = kept + dropped + rejected."""
        candidates = taken.candidates
        rejected = self.rejects.of(candidates.source)
        dropped = {reason: n for reason, n in candidates.dropped.items() if n}
        not_drawn = candidates.read - len(taken) - sum(dropped.values()) - sum(rejected.values())
        return {
            "location": candidates.source.location,
            "read": candidates.read,
            "kept": len(taken),
            "dropped": dropped | ({"not drawn": not_drawn} if not_drawn else {}),
            "rejected": dict(sorted(rejected.items())),
        }


def _count_cuts(counts: Counter[str], text: dict[str, Any]) -> None:
    for name, tokens in (("source", text["cut_source"]), ("text", text["cut"])):
        if tokens:
            counts[f"{name}s"] += 1
            counts[f"{name} tokens"] += tokens
    if text["hidden"]:
        counts["replies that the template hides"] += text["hidden"]
    if text["no_reasoning"]:
        counts["replies whose reasoning the template hides"] += text["no_reasoning"]


def _opened(path: Path) -> Any:
    import datasets

    return datasets.Dataset.from_file(str(path))


def _fetched(rows: Any, indices: list[int]) -> list[dict[str, Any]]:
    """Some rows of a data set, in this order; many at a time, since one at a time is slow."""
    if not indices:
        return []
    columns = rows[indices]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@contextlib.contextmanager
def _one_thread_each(workers: int) -> Iterator[None]:
    """Processes that encode side by side must not start threads of their own, which would also be lost by forking."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers > 1 else "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
