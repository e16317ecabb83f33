"""Files of a data folder, and its `data_config.json`: what it was made from, and what became of every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockdraft.errors import InputError
from blockdraft.files import read_json
from blockdraft.typed import checked

TABLE, RECORD, REJECTS = "documents.parquet", "data_config.json", "rejects.jsonl"
# What commands read of it; it may state more.
_FACTS = {
    "tokenizer": str, "thinking": str, "tools": list[dict[str, Any]], "rewritten_history": str,
    "train_data_ratio": float, "max_source_length": int, "max_length": int,
    "verifier": dict[str, str | int | None] | None,
}  # fmt: skip
_SOURCE = {
    "read": int, "kept": int, "documents": int, "tokens": {"source": int, "text": int, "learned": int},
    "dropped": dict[str, int], "rejected": dict[str, int], "finish": dict[str, int], "cut": dict[str, int] | None,
}  # fmt: skip
_RECORD = {
    "facts": _FACTS, "sources": dict[str, Any], "digest": str, "documents": int, "train": int, "validation": int,
    "distinct_tokens": int, "draft_vocabulary": dict[str, float],
}  # fmt: skip


def read_record(folder: Path, field: str) -> dict[str, Any]:
    """The record of a data folder.

    Raises:
        InputError: there is none, or what it states is of another kind than commands write.
    """
    where = f"{field} {folder / RECORD}"
    found: dict[str, Any] = checked(_RECORD, read_json(folder / RECORD, field), where)
    for name, counts in found["sources"].items():
        checked(_SOURCE, counts, f"{where} sources {name}")
    ratio = found["facts"]["train_data_ratio"]
    if not 0 < ratio < 1:
        raise InputError(f"{where} facts train_data_ratio", ratio, "must be between 0 and 1")
    return found
