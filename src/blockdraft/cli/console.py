"""The lines of the logger `blockdraft` on stderr; stdout stays for results."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from blockdraft.errors import InputError
from blockdraft.progress import LOGGER


class _Console(logging.Handler):
    """Prints to what stderr is at the time: a progress bar takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _Lines(logging.Formatter):
    """Messages as they stand; details with the place that they come from, errors of several processes with whose."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.ERROR and "RANK" in os.environ:
            text = f"rank {os.environ['RANK']}: {text}"
        return text if record.levelno >= logging.INFO else f"[{record.module}] {text}"


def speaks(record: logging.LogRecord) -> bool:
    """Whether this process of a run says so: the first one says all, the others what ends them."""
    return record.levelno >= logging.ERROR or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def console() -> Iterator[None]:
    """Show what is logged while the body runs, from INFO on; `set_level` changes that."""
    handler, before = _Console(), LOGGER.level
    handler.setFormatter(_Lines())
    handler.addFilter(speaks)
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
