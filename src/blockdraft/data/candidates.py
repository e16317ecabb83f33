"""The usable rows of a source, read once and put on disk, and the rows that cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from blockdraft.data.conversations import Conversation, RowError, content_digest, questions, request
from blockdraft.data.converters import Tokens, convert
from blockdraft.data.mixture import Hashes
from blockdraft.data.readers import read_rows
from blockdraft.data.sources import Source
from blockdraft.progress import Advance

_SCHEMA = pa.schema([("line", pa.int64()), ("id", pa.string()), ("conversation", pa.string()), ("tokens", pa.string())])
_ROWS_AT_ONCE = 1000


@dataclass
class Rejects:
    """Rows that cannot be used: written to a file as they are met, counted by source and reason."""

    handle: TextIO
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, source: Source, line: int, error: RowError) -> None:
        """Name a row."""
        row = {
            "source": source.name,
            "file": source.location,
            "line": line,
            "reason": error.reason,
            "detail": error.detail,
        }
        self.handle.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.counts.setdefault(source.name, Counter())[error.reason] += 1

    def of(self, source: Source) -> Counter[str]:
        """Counts by reason."""
        return self.counts.get(source.name, Counter())


@dataclass(frozen=True)
class Candidates:
    """Usable rows of one source.

    Attributes:
        path: Arrow file with line, id and content of each.
        read: rows that the source has, usable or not.
        contents: digest of each row's content, 32 hex digits.
        keys: digest of what each row asks.
        kept: indices that are neither duplicates nor excluded, in the source's order.
        dropped: other rows, by reason.
    """

    source: Source
    path: Path
    read: int
    contents: Hashes
    keys: Hashes
    kept: NDArray[np.int64]
    dropped: dict[str, int]


def collect(
    source: Source, path: Path, rejects: Rejects, rewrite: bool, excluded: frozenset[str], advance: Advance
) -> Candidates:
    """Read a source.

    Args:
        path: where usable rows are put.
        rewrite: replies will be written by the verifier; those in the rows do not count.
        excluded: digests of questions that must not be taken.
        advance: told how many rows were read.
    """
    read, contents, keys, allowed = 0, Hashes(), Hashes(), bytearray()
    seen_ids: set[int] = set()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        batch: list[dict[str, Any]] = []
        for line, row in read_rows(source):
            read += 1
            if read % _ROWS_AT_ONCE == 0:  # a bar that is drawn for every row would take longer than reading it
                advance(_ROWS_AT_ONCE)
            try:
                item = _converted(row, source, rewrite)
                if item.id is not None:
                    _require_new(item.id, seen_ids)
            except RowError as error:
                rejects.add(source, line, error)
                continue
            record, content, key, asked = _facts(item)
            batch.append({"line": line, "id": f"{source.name}:{item.id or line}", **record})
            contents.append(content)
            keys.append(key)
            allowed.append(not asked & excluded)
            if len(batch) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(batch, _SCHEMA))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, _SCHEMA))
    advance(read % _ROWS_AT_ONCE)
    kept = np.flatnonzero(np.frombuffer(allowed, dtype=bool))
    return Candidates(source, path, read, contents, keys, kept, {"overlap": len(allowed) - len(kept)})


def overlapping_questions(sources: list[Source]) -> frozenset[str]:
    """Hashes of what evaluation files ask; rows of them that cannot be used have nothing to exclude."""
    found: set[str] = set()
    for source in sources:
        for _, row in read_rows(source):
            try:
                item = _converted(row, source, rewrite=True)
            except RowError:
                continue
            found |= _facts(item)[3]
    return frozenset(found)


def _converted(row: Any, source: Source, rewrite: bool) -> Conversation | Tokens:
    if isinstance(row, RowError):
        raise row
    return convert(row, source.converter, rewrite)


def _require_new(identity: str, seen: set[int]) -> None:
    mark = hash(identity)
    if mark in seen:
        raise RowError("duplicate id", identity[:60])
    seen.add(mark)


def _facts(item: Conversation | Tokens) -> tuple[dict[str, str | None], str, str, frozenset[str]]:
    """What is stored of a row; the digests of its content and of what it asks; the digests of its questions."""
    if isinstance(item, Tokens):
        text = json.dumps(asdict(item) | {"id": None})
        asked = item.source_ids or item.input_ids[: item.targets[0][0]]
        return {"conversation": None, "tokens": text}, content_digest(text), content_digest(asked), frozenset()
    text = item.to_json()
    asked_for = frozenset(content_digest(question) for question in questions(item.messages))
    return (
        {"conversation": text, "tokens": None},
        content_digest(text),
        content_digest(request(item.messages)),
        asked_for,
    )
