"""Hashes of everything that determined a result, so that a result is reused for the same request and no other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError
from blockdraft.files import read_json_object
from blockdraft.typed import checked

_SHOWN, _LONGEST = 5, 60  # differences that an error names, and characters of a value in it


def digest_of(facts: Any) -> str:
    """16 hex digits of SHA-256 over JSON-ready facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def already_made(
    record: Path, facts: dict[str, Any], field: str, hint: str = "choose another folder or delete this one"
) -> bool:
    """Whether the folder of `record` (a JSON file with the key `facts`) holds the result of these facts.

    Raises:
        InputError: it holds the result of other facts, those that differ are named; or `record` is no such file.
    """
    if not record.exists():
        return False
    found = checked(dict[str, Any], read_json_object(record, field).get("facts"), f"{field} {record} facts")
    changed = [
        f"{name} {_short(old)}, now asked for {_short(new)}" for name, old, new in _differences("", found, facts)
    ]
    if changed:
        more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise InputError(field, record.parent, f"was made with {'; '.join(changed[:_SHOWN])}{more}; {hint}")
    return True


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """The leaves in which two JSON values differ, by their dotted names; what is absent is None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(f"{name}.{key}" if name else key, old.get(key), new.get(key))
    elif old != new:
        yield name, old, new


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def file_digest(path: Path, field: str) -> str:
    """64 hex digits of SHA-256 over a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise InputError(field, path, f"cannot be read ({error.strerror})") from None
