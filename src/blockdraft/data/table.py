"""The table that a data folder holds: one Parquet file, a row a text, read without unpacking it.

`prepare` and `regenerate` write it, `train` reads it. Beside it stands `data_config.json`: what it was made from, and
what became of every row of every source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from blockdraft.data.record import RECORD as RECORD
from blockdraft.data.record import REJECTS as REJECTS
from blockdraft.data.record import TABLE as TABLE
from blockdraft.errors import InputError
from blockdraft.files import writing
from blockdraft.progress import LOGGER
from blockdraft.records import Example, Span

_IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),  # source:row
        pa.field("part", pa.int32(), nullable=False),  # 0, 1, ... where a conversation makes several texts
        pa.field("source", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),  # digest of what is asked
        pa.field("conversation", pa.string()),  # JSON, with the first text of a conversation; none of ready tokens
        pa.field("source_ids", _IDS),  # where the verifier has an encoder
        pa.field("input_ids", _IDS, nullable=False),
        pa.field("targets", _IDS, nullable=False),  # start, end, start, end, ...
        pa.field("finish", pa.string(), nullable=False),
    ]
)
_ROWS_AT_ONCE = 1000


def flat(targets: Sequence[Span]) -> list[int]:
    """Spans as the table holds them."""
    return [bound for span in targets for bound in span]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows in order; the same rows give the same bytes."""
    with writing(path), pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(batch, SCHEMA))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, SCHEMA))


class Examples(Sequence[Example]):
    """Examples of a data folder, each made when it is asked for: token ids stay in Arrow's buffers."""

    def __init__(self, table: pa.Table, indices: np.ndarray | None = None) -> None:
        self._table = table.combine_chunks()
        self._indices = np.arange(len(table)) if indices is None else indices
        self._columns = {name: _Lists(self._table, name) for name in ("input_ids", "targets", "source_ids")}

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Examples: ...
    def __getitem__(self, index: int | slice) -> Example | Examples:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        row = int(self._indices[index])
        bounds = self._columns["targets"].get(row) or []
        part = self._table["part"][row].as_py()
        return Example(
            self._table["id"][row].as_py() + (f"#{part}" if part else ""),
            self._columns["input_ids"].get(row) or [],
            tuple(zip(bounds[::2], bounds[1::2], strict=True)),
            self._table["finish"][row].as_py(),
            self._columns["source_ids"].get(row),
            self._table["key"][row].as_py(),
        )

    def select(self, indices: Sequence[int]) -> Examples:
        """Some of the examples, in this order."""
        return Examples(self._table, self._indices[np.asarray(indices, dtype=np.int64)])

    def joined(self, others: Examples) -> Examples:
        """These, and then others of the same table."""
        return Examples(self._table, np.concatenate([self._indices, others._indices]))

    def column(self, name: str) -> list[Any]:
        """One column of all examples."""
        return self._table[name].take(pa.array(self._indices)).to_pylist()


class _Lists:
    """A column of lists of integers."""

    def __init__(self, table: pa.Table, name: str) -> None:
        chunks = table[name].chunks
        column = chunks[0] if chunks else pa.array([], _IDS)
        self._values = column.values.to_numpy(zero_copy_only=True) if len(column) else np.empty(0, np.int32)
        self._offsets = column.offsets.to_numpy(zero_copy_only=True) if len(column) else np.zeros(1, np.int32)
        self._missing = column.is_null().to_numpy(zero_copy_only=False)

    def get(self, row: int) -> list[int] | None:
        if self._missing[row]:
            return None
        return self._values[self._offsets[row] : self._offsets[row + 1]].tolist()


def read_table(folder: Path, field: str) -> pa.Table:
    """The table of a data folder.

    Raises:
        InputError: there is none, or it is damaged or of another shape.
    """
    path = folder / TABLE
    if not path.is_file():
        raise InputError(field, folder, f"no {TABLE} there; make it with blockdraft prepare")
    try:
        table = pq.read_table(path, memory_map=True)
        LOGGER.debug("read %s", path)
    except pa.ArrowException as error:
        raise InputError(field, path, f"damaged ({str(error).splitlines()[0][:120]})") from None
    if table.schema.names != SCHEMA.names:
        raise InputError(field, path, "not a table of blockdraft prepare")
    return table


def read_examples(folder: Path, field: str) -> Examples:
    """The examples of a data folder.

    Raises:
        InputError: there are none, or their replies are still to be written.
    """
    examples = Examples(read_table(folder, field))
    if not len(examples):
        raise InputError(field, folder, "no examples in it")
    if not all(examples.column("targets")):
        raise InputError(field, folder, "its replies are still to be written; run blockdraft regenerate on it")
    return examples
