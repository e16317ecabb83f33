"""Writing files and folders so that a kill at any moment leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, field: str) -> Any:
    """Read a JSON file; a missing or broken one is an InputError under the name `field`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(field, path, "no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(field, path, f"not valid JSON ({error})") from None


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; when the body ends well, it takes the place of `folder`.

    When the body raises, nothing of it stays behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
