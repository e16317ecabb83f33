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
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as handle:
        handle.write(content)
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


def require_free(folder: Path, field: str, own: str | None = None) -> None:
    """Refuse a folder that holds files of somebody else.

    Args:
        own: beginning of the names of files that an earlier run left to go on from.
    """
    if folder.exists() and any(own is None or not path.name.startswith(own) for path in folder.iterdir()):
        raise InputError(field, folder, "holds something else; choose another folder")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; when the body ends well, it takes the place of `folder`.

    When the body raises, nothing of it stays behind; what a killed process left is taken away, or taken back where it
    was killed between the two renamings.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clear_remains(folder)
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


def _clear_remains(folder: Path) -> None:
    for path in folder.parent.glob(f".{folder.name}.*"):
        process, _, kind = path.name.removeprefix(f".{folder.name}.").partition(".")
        if kind not in ("tmp", "old") or not process.isdigit() or _is_alive(int(process)):
            continue
        if kind == "old" and not folder.exists():
            path.replace(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
