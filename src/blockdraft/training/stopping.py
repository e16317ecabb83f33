"""Stopping a run before its end: by a signal, or since its time is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blockdraft.progress import say


@contextmanager
def stop_requested(deadline: float | None = None) -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM and Ctrl-C into a question that the loop asks between steps; a second Ctrl-C ends at once.

    Args:
        deadline: when `time.monotonic()` has come so far, the answer is yes, too.
    """
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
        yield lambda: asked or (deadline is not None and time.monotonic() >= deadline)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
