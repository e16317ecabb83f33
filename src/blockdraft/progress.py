"""What is said while work goes on: lines of the logger `blockdraft`, and progress bars on a terminal.

The command line shows these lines on stderr (`cli/console.py`). In a library they go where its user sends them, and
nowhere by default. Levels: DEBUG for details, INFO for running commentary, WARNING for what may spoil a result.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from blockdraft.runtime import process_place

LOGGER = logging.getLogger("blockdraft")


class Advance(Protocol):
    """Report that `steps` more are done; `note` is shown beside the bar."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


def say(message: str) -> None:
    """Log one line of running commentary."""
    LOGGER.info("%s", message, stacklevel=2)


def warn(message: str) -> None:
    """Log one line that matters for the result, also to who wants no commentary."""
    LOGGER.warning("%s", message, stacklevel=2)


@contextlib.contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show progress over `total` steps (0: not known) of which `done` were finished by an earlier run.

    On a terminal it is a bar, unless the logger's own level leaves commentary out; elsewhere it is lines of the log.
    """
    wants_bar = sys.stderr.isatty() and LOGGER.level <= logging.INFO and process_place()[0] == 0
    shown = _bar(label, total, done) if wants_bar else _lines(label, total, done)
    with shown as advance:
        yield advance


@contextlib.contextmanager
def _bar(label: str, total: int, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total or None, completed=done, note="")

        def advance(steps: int = 1, note: str = "") -> None:
            bar.update(task, advance=steps)
            if note:
                bar.update(task, note=note)

        yield advance


@contextlib.contextmanager
def _lines(label: str, total: int, done: int, every_seconds: float = 15.0) -> Iterator[Advance]:
    start = last = time.monotonic()
    finished = done

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal last, finished
        finished += steps
        now = time.monotonic()
        if now - last < every_seconds:
            return
        if not total:
            last = now
            say(f"{label}: {finished}")
        elif finished < total:
            last = now
            left = (total - finished) * (now - start) / max(finished - done, 1)
            say(f"{label}: {finished}/{total}, {left:.0f} s left {note}".rstrip())

    yield advance
    say(f"{label}: {finished}{f'/{total}' if total else ''} in {time.monotonic() - start:.0f} s")
