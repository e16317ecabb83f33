"""Hashes of everything that determined a result, so that a result is reused for the same request and no other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError
from blockdraft.files import read_json


def fingerprint(facts: Any) -> str:
    """16 hex digits of SHA-256 over JSON-ready facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def already_made(record: Path, facts: dict[str, Any], field: str) -> bool:
    """Whether the folder of `record` (a JSON file with the key `facts`) holds the result of these facts.

    Raises:
        InputError: it holds the result of other facts; the first that differs is named.
    """
    if not record.is_file():
        return False
    found = read_json(record, field).get("facts", {})
    for key in sorted(facts.keys() | found.keys()):
        if facts.get(key) != found.get(key):
            raise InputError(
                field,
                record.parent,
                f"was made with {key} {found.get(key)!r}, now asked for {facts.get(key)!r}; "
                "choose another folder or delete this one",
            )
    return True


def file_hash(path: Path, field: str) -> str:
    """64 hex digits of SHA-256 over a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise InputError(field, path, f"cannot be read ({error.strerror})") from None
