"""Files and folders of the user: every reading and writing of them goes through here.

What cannot be read is an `InputError` that names the field; what cannot be written is a `BlockdraftError` that names
the file. A kill at any moment leaves the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockdraft.errors import BlockdraftError, InputError
from blockdraft.progress import LOGGER

LOCK = ".lock"


@contextlib.contextmanager
def reading(path: Path, field: str) -> Iterator[None]:
    """Turn what goes wrong while a user's file is read into an InputError under the name `field`.

    The body may open, decode and parse the file as text, JSON or anything whose errors are ValueErrors.
    """
    try:
        yield
    except FileNotFoundError:
        raise InputError(field, path, "no such file") from None
    except IsADirectoryError:
        raise InputError(field, path, "is a folder, not a file") from None
    except OSError as error:
        raise InputError(field, path, f"cannot be read ({reason(error)})") from None
    except json.JSONDecodeError as error:
        raise InputError(field, path, f"not valid JSON ({error})") from None
    except UnicodeDecodeError as error:
        raise InputError(field, path, f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(field, path, f"cannot be read ({reason(error)})") from None


@contextlib.contextmanager
def writing(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong while `path` is written into a BlockdraftError of one line.

    Args:
        others: what a library raises in place of an OSError when the disk is full.
    """
    failures: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except failures as error:
        raise BlockdraftError(f"{path}: cannot be written ({reason(error)})") from None


def reason(error: BaseException) -> str:
    """Why something failed, in one line without the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_text(path: Path, field: str) -> str:
    """Read a UTF-8 text file.

    Raises:
        InputError: under the name `field`, when it is missing, a folder, not readable or not UTF-8.
    """
    with reading(path, field):
        text = path.read_text(encoding="utf-8")
    LOGGER.debug("read %s", path)
    return text


def read_json(path: Path, field: str) -> Any:
    """Read a JSON file; see `read_text` for what is an InputError. NaN and infinities are no JSON."""
    text = read_text(path, field)
    with reading(path, field):
        return json.loads(text, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def read_json_object(path: Path, field: str) -> dict[str, Any]:
    """Read a JSON file that must hold one object."""
    found = read_json(path, field)
    if not isinstance(found, dict):
        raise InputError(field, path, "must hold one JSON object")
    return found


def write_text(path: Path, text: str) -> None:
    """Write a text file; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, flush it to disk and rename it into place.

    Raises:
        BlockdraftError: the disk is full or read-only, or a file stands where a folder should.
    """
    temporary = _temporary(path)
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
            LOGGER.debug("wrote %s", path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def link(path: Path, target: Path) -> None:
    """Let `path` be a link to `target`, relative so that both can be moved together; a link there before is replaced.

    Raises:
        BlockdraftError: the disk takes no link.
    """
    temporary = _temporary(path)
    with writing(path):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, path.parent))
        temporary.replace(path)


def require_writable(folder: Path, field: str) -> None:
    """Reject a folder that cannot be made or written to, before any work is done for it. It is not made here."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise InputError(field, folder, f"{place} is a file; choose a folder")
    trial = place / f".blockdraft.{os.getpid()}.tmp"
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise InputError(field, folder, f"cannot be written to ({reason(error)}); choose another folder") from None


def require_free(folder: Path, field: str, own: str | None = None) -> None:
    """Reject a folder that cannot be written to, or that holds files of somebody else.

    Args:
        own: beginning of the names of files that an earlier run left to go on from.
    """
    require_writable(folder, field)
    others = (path.name for path in folder.iterdir() if path.name != LOCK) if folder.exists() else ()
    if any(own is None or not name.startswith(own) for name in others):
        raise InputError(field, folder, "holds something else; choose another folder")


@contextlib.contextmanager
def locked(folder: Path, field: str) -> Iterator[None]:
    """Hold a folder for one process: whoever comes second gets an InputError that names the first.

    The lock is on a file beside the folder, so that the folder itself may be replaced; inside of it only where nobody
    may write beside it, as with a disk of its own. The system drops it when the process ends, however it ends.
    """
    require_writable(folder, field)
    path = _lock_file(folder.resolve())
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path)
    if descriptor is None:
        holder = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
        raise InputError(
            field, folder, f"is in use by process {holder or '?'}; wait for it, or choose another folder"
        )  # fmt: skip
    try:
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock_file(folder: Path) -> Path:
    beside = folder.parent
    if folder.is_dir() and (beside == folder or not os.access(beside, os.W_OK)):
        return folder / LOCK
    return beside / f".{folder.name}{LOCK}"


def _lock(path: Path) -> int | None:
    """The descriptor of a locked, empty file, or None where another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it between the opening and the locking: then the lock is on nothing.
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                os.ftruncate(descriptor, 0)
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        os.close(descriptor)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; when the body ends well, it takes the place of `folder`.

    When the body raises, nothing of it stays behind; what a killed process left is taken away, or taken back where it
    was killed between the two renamings.
    """
    temporary = _temporary(folder)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_remains(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    try:
        yield temporary
        with writing(folder):
            _take_its_place(temporary, folder)
        LOGGER.debug("wrote %s", folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _take_its_place(temporary: Path, folder: Path) -> None:
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


def _temporary(path: Path) -> Path:
    """Where a file or folder is made; the name says by which process."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _clear_remains(folder: Path) -> None:
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        own = path.stem.rpartition(".")[0] == f".{folder.name}"  # and not that of a longer name
        if not (own and _is_left_behind(path)):
            continue
        if path.suffix == ".old" and not folder.exists():
            path.replace(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def clear_temporaries(folder: Path, pattern: str) -> None:
    """Remove the temporary files below `folder` that match and whose process is gone."""
    for path in folder.glob(pattern):
        if path.is_file() and _is_left_behind(path):
            path.unlink(missing_ok=True)


def _is_left_behind(path: Path) -> bool:
    """Whether a name is that of a temporary or replaced file or folder, and its process is gone."""
    _, _, process = path.stem.rpartition(".")
    return path.suffix in (".tmp", ".old") and process.isdigit() and not _is_alive(int(process))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
