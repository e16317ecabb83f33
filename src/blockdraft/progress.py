"""Progress on stderr: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Protocol


class Advance(Protocol):
    """Report that `steps` more are done; `note` is shown beside the bar."""

    def __call__(self, steps: int = 1, note: str = "") -> None: ...


def say(message: str) -> None:
    """Print one line of running commentary to stderr; stdout stays for results."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show progress over `total` steps (0: not known) of which `done` were finished by an earlier run."""
    shown = _bar(label, total, done) if sys.stderr.isatty() else _lines(label, total, done)
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
