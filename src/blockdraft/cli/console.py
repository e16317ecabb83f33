"""The lines of the logger `blockdraft` on stderr; stdout stays for results."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from blockdraft.errors import InputError
from blockdraft.progress import LOGGER


class _Console(logging.Handler):
    """Prints to what stderr is at the time: a progress bar takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _Lines(logging.Formatter):
    """Messages as they stand; details with the place that they come from."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno >= logging.INFO else f"[{record.module}] {text}"


@contextlib.contextmanager
def console() -> Iterator[None]:
    """Show what is logged while the body runs, from INFO on; `set_level` changes that."""
    handler, before = _Console(), LOGGER.level
    handler.setFormatter(_Lines())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(before)
        LOGGER.removeHandler(handler)


def set_level(verbose: bool, quiet: bool) -> None:
    """What --verbose and --quiet ask for.

    Raises:
        InputError: both were given.
    """
    if verbose and quiet:
        raise InputError("--verbose and --quiet", "both given", "pass one of them")
    LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
