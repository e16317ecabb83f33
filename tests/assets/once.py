"""Folders that are made by the process that comes first and used by all."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

from blockdraft.files import replacing


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder with what `make` writes into the one it is given, whole or not at all; other processes wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, also when the process is killed
        if not folder.exists():
            with replacing(folder) as temporary:
                make(temporary)
    return folder
