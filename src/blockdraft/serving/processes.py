"""Servers as processes: started, watched, ended, with nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from blockdraft.errors import BlockdraftError
from blockdraft.progress import say
from blockdraft.serving.client import wait_until_ready
from blockdraft.serving.engine_log import KEPT, cause
from blockdraft.serving.launcher import Launch

READY_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1


def serve_until_stopped(plan: Launch, when_ready: Callable[[], None] | None = None) -> None:
    """Run a server in the foreground. SIGTERM and Ctrl-C end it, a second one kills it; nothing of it is left behind.

    Args:
        when_ready: called once it is healthy.

    Raises:
        BlockdraftError: it ended by itself; the message has the cause that it logged.
        KeyboardInterrupt: it was ended by Ctrl-C.
    """
    process = _start(plan, subprocess.PIPE, _end_with_parent if sys.platform == "linux" else None)
    said: deque[str] = deque(maxlen=KEPT)
    assert process.stdout is not None
    echo = threading.Thread(target=_echo, args=(process.stdout, said), daemon=True)
    echo.start()
    signals: list[int] = []

    def end(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            _end_group(process)
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            say("blockdraft: ending the server; once more kills it")

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if when_ready is not None:
            with _unless(lambda: bool(signals) or process.poll() is not None):
                wait_until_ready(plan.url, lambda: not signals and process.poll() is None, READY_SECONDS)
                when_ready()
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _end_group(process)
        echo.join(timeout=5)  # what still holds the pipe open is gone
    if not signals:
        raise BlockdraftError(f"vLLM ended by itself: {cause(said, code)}")
    if signals[0] == signal.SIGINT:
        raise KeyboardInterrupt("the server has ended")


@contextlib.contextmanager
def running(plan: Launch, log: Path, ready_seconds: float = READY_SECONDS) -> Iterator[subprocess.Popen[bytes]]:
    """A server in the background, healthy when the body starts and gone when it ends.

    Args:
        log: file for what the engine says.

    Raises:
        BlockdraftError: it did not come up; the message has the cause that it logged.
    """
    with log.open("wb") as output:
        process = _start(plan, output)
    try:
        try:
            wait_until_ready(plan.url, lambda: process.poll() is None, ready_seconds)
        except BlockdraftError as error:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise BlockdraftError(f"{error}: {cause(lines, process.poll())}") from None
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], seconds: float = 60.0) -> int:
    """Ask a server to end, and kill its whole group if it does not; returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _end_group(process)
    return process.wait()


def _start(plan: Launch, output: Any, first: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """A server in a group of its own; `first` is called in the new process."""
    return subprocess.Popen(
        plan.command,
        env={**os.environ, **plan.environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=first,
    )


def _end_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone, whatever killed it (strictly, the thread that started it)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _echo(output: IO[bytes], said: deque[str]) -> None:
    """Pass on what a server says, and keep its last lines."""
    complete = True
    for line in output:
        said.append(line.decode(errors="replace").rstrip())
        complete = line.endswith(b"\n")
        sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()
    if not complete:  # what follows begins a line
        sys.stderr.write("\n")


@contextlib.contextmanager
def _unless(ended: Callable[[], bool]) -> Iterator[None]:
    """Let an error pass only if the server has not ended: its end has its own message."""
    try:
        yield
    except BlockdraftError:
        if not ended():
            raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a server's processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
