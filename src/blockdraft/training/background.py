"""Writing while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """One thread that writes what it is given, one thing after the other.

    Training waits only where it wants to write again before the last time is over.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writing")
        self._last: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Write in the background, once the writing before is done.

        Raises:
            Exception: what the writing before raised.
        """
        self.wait()
        self._last = self._pool.submit(write)

    def raise_failure(self) -> None:
        """Raise what the last writing raised, if it is over; never waits."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is written, and raise what could not be."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()


@contextlib.contextmanager
def background_writer() -> Iterator[BackgroundWriter]:
    """A writer whose work is done when the block ends, also where an error ends it; that error is the one raised."""
    writer = BackgroundWriter()
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(Exception):
            writer.close()
        raise
    writer.close()
