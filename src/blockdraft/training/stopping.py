"""Stopping a run from outside."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blockdraft.progress import say


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and Ctrl-C into a question that the loop asks between steps; a second Ctrl-C ends at once."""
    asked = False

    def ask(number: int, _: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        say("stopping after this step ...")

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
