"""Rows of a source, one after the other: JSON lines, JSON, CSV, TSV and Parquet files, folders and hub ids, builtins.

Text files are read line by line, so that a broken line is a row that cannot be used and not the end of the run.
Everything else is read by pyarrow and `datasets`.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from blockdraft.data.conversations import RowError
from blockdraft.data.converters import shape_of
from blockdraft.data.sources import BUILTIN, Source
from blockdraft.data.workloads import workload_prompts
from blockdraft.errors import InputError
from blockdraft.extras import require
from blockdraft.files import reading, reason
from blockdraft.progress import LOGGER

Numbered = tuple[int, Any]  # line, or number of the item, from 1; the row, or the RowError that it is
_ROWS_AT_ONCE = 1024
_SLICE = re.compile(r"\[(\d*):(\d*)\]")
PAIR_COLUMNS = ("source", "target")  # of a table of two columns without a header


def read_rows(source: Source) -> Iterator[Numbered]:
    """Every row with its line, unusable ones as the RowError that says why.

    Raises:
        InputError: nothing there, or not readable at all.
    """
    path = Path(source.location)
    if source.location.startswith(BUILTIN):
        return _builtin(source)
    if path.is_file():
        return _sliced(_file_rows(path, source.name), source)
    return _dataset_rows(source)


def pinned(source: Source) -> Source:
    """A source that reads the same rows later: of a hub data set, its newest commit.

    Raises:
        InputError: the hub cannot be asked, or knows no such data set.
    """
    if source.location.startswith(BUILTIN) or Path(source.location).exists():
        return source
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(_hub_name(source)[0]).sha
    except Exception as error:  # whatever the hub's client raises
        raise _unreadable(source, error) from None
    return dataclasses.replace(source, revision=commit)


def source_digest(source: Source) -> str:
    """What the source's content is known by: a digest of its files, or for hub ids and builtins of what they are."""
    path = Path(source.location)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    if not path.exists():
        builtin = source.location.startswith(BUILTIN)
        facts = json.dumps(workload_prompts(_workload(source))) if builtin else source.revision or ""
        return hashlib.sha256(f"{source.location}:{source.split}:{facts}".encode()).hexdigest()[:16]
    total = hashlib.sha256()
    for file in files:
        with reading(file, "--source"), file.open("rb") as handle:
            total.update(hashlib.file_digest(handle, "sha256").digest())
    return total.hexdigest()[:16]


def suffix_of(path: Path) -> str:
    """The suffix that names the format; `.gz` aside."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _file_rows(path: Path, name: str) -> Iterator[Numbered]:
    readers = {
        ".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_array, ".csv": _table, ".tsv": _table,
        ".parquet": _parquet,
    }  # fmt: skip
    reader = readers.get(suffix_of(path))
    if reader is None:
        raise InputError("--source", f"{name}={path}", f"unknown kind of file; known are {', '.join(readers)} (.gz)")
    LOGGER.debug("reading %s", path)
    try:
        yield from reader(path)
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:  # damaged, cut short, or not what it says
        raise InputError("--source", f"{name}={path}", f"cannot be read ({reason(error)})") from None


def _sliced(rows: Iterator[Numbered], source: Source) -> Iterator[Numbered]:
    if source.split is None:
        return rows
    bounds = _SLICE.fullmatch(source.split)
    if bounds is None:
        raise InputError("--source", f"{source.name}: split {source.split!r}", "a file has rows only: such as [0:500]")
    start, stop = (int(bound) if bound else None for bound in bounds.groups())
    return itertools.islice(rows, start, stop)


def _open(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _json_lines(path: Path) -> Iterator[Numbered]:
    with _open(path) as handle:
        for number, line in enumerate(handle, start=1):
            if line.strip():
                yield number, _parsed(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError("not UTF-8 text", f"byte {error.start}")
    except json.JSONDecodeError as error:
        return RowError("broken JSON", error.msg)
    except RecursionError:
        return RowError("broken JSON", "nested too deep")
    except ValueError:  # Python reads no integer of thousands of digits
        return RowError("broken JSON", "a number of thousands of digits")


def _json_array(path: Path) -> Iterator[Numbered]:
    with _open(path) as handle:
        found = _parsed(handle.read().removeprefix(b"\xef\xbb\xbf"))
    if isinstance(found, RowError) and found.detail == "Extra data":  # JSON lines under another name
        yield from _json_lines(path)
        return
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), RowError("no list of rows"))
    if not isinstance(found, list):
        yield 1, found if isinstance(found, RowError) else RowError("not a list of rows", type(found).__name__)
        return
    yield from enumerate(found, start=1)


def _table(path: Path) -> Iterator[Numbered]:
    """CSV with a header; TSV with one, or of two columns without."""
    tabs = suffix_of(path) == ".tsv"
    # Quotes mean nothing in tab-separated text; newlines stand inside quotes in CSV only.
    form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
    csv.field_size_limit(2**31 - 1)
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        lines = csv.reader(handle, **form)
        header = next(lines, [])
        if tabs and not _is_header(header):
            yield 1, _cells(PAIR_COLUMNS, header)
            header = list(PAIR_COLUMNS)
        while True:
            number = lines.line_num + 1
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, RowError("broken table row", str(error))
                continue
            if cells:
                yield number, _cells(header, cells)


def _is_header(cells: list[str]) -> bool:
    try:
        shape_of(dict.fromkeys(cells))
    except RowError:
        return False
    return True


def _cells(header: Any, cells: list[str]) -> Any:
    if len(cells) != len(header):
        return RowError("another number of columns", f"{len(cells)} instead of {len(header)}")
    if any("\udc80" <= character <= "\udcff" for cell in cells for character in cell):
        return RowError("not UTF-8 text")
    return dict(zip(header, cells, strict=True))


def _parquet(path: Path) -> Iterator[Numbered]:
    require("pyarrow")
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    try:
        batches = pq.ParquetFile(path).iter_batches(_ROWS_AT_ONCE)
        yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), start=1)
    except ArrowException as error:
        raise ValueError(reason(error)) from None


def _dataset_rows(source: Source) -> Iterator[Numbered]:
    require("datasets")
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.location)
    try:
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            found: Any = datasets.load_from_disk(str(path))
            if isinstance(found, datasets.DatasetDict):
                found = found[source.split or "train"]
        else:
            name, config = (source.location, None) if path.exists() else _hub_name(source)
            found = datasets.load_dataset(
                name, config, split=source.split or "train", streaming=not path.exists(), revision=source.revision
            )
        yield from enumerate((dict(row) for row in found), start=1)
    except Exception as error:  # whatever the hub's client raises: no network, no such name, no such split
        raise _unreadable(source, error) from None


def _hub_name(source: Source) -> tuple[str, str | None]:
    """A hub id, which has one slash, and the part of it that follows a second."""
    parts = source.location.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None


def _unreadable(source: Source, error: Exception) -> InputError:
    return InputError("--source", f"{source.name}={source.location}", f"cannot be read ({reason(error)})")


def _workload(source: Source) -> str:
    return source.location.removeprefix(BUILTIN)


def _builtin(source: Source) -> Iterator[Numbered]:
    parts = dict(zip(("train", "heldout"), workload_prompts(_workload(source)), strict=True))
    split = source.split or "train"
    if split not in parts:
        raise InputError("--source", f"{source.name}: split {split!r}", f"choose one of {', '.join(parts)}")
    return enumerate(({"messages": conversation} for conversation in parts[split]), start=1)
