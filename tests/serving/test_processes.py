"""How a server ends, with small programs in the engine's place: crashes, Ctrl-C, and one that hears no signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from blockdraft.errors import BlockdraftError
from blockdraft.serving.engine_log import cause
from blockdraft.serving.launcher import Launch
from blockdraft.serving.processes import running
from conftest import free_port

# Runs `serve` on a plan whose command is the program in its first argument; prints what `blockdraft serve` would.
SERVE = """
import sys
from blockdraft.cli.main import run
from blockdraft.pipeline import serve
from blockdraft.serving.launcher import Launch

serve.planned = lambda settings: Launch([sys.executable, "-c", sys.argv[1]], {}, "plan", "http://127.0.0.1:9")
sys.exit(run(["serve", "x"]))
"""
DEAF = """
import os, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("deaf", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(f"pids {os.getpid()} {child.pid}", flush=True)
while True:
    time.sleep(1000)
"""
OBEDIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
while True:
    time.sleep(1000)
"""
ENGINE_DIES = """
print("(Worker pid=7) ERROR 12-03 02:14:21 [multiproc_executor.py:9] Traceback (most recent call last):")
print("(Worker pid=7) ERROR 12-03 02:14:21 [multiproc_executor.py:9] IndexError: max(): nothing to take")
print("(EngineCore pid=6) RuntimeError: Worker failed with error 'max()', please check the stack trace above")
print("(APIServer pid=5) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
for _ in range(50):
    print("noise")
print("nanobind: leaked", end="")
"""


def serve(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    """Read stderr up to the line with a word."""
    assert process.stderr is not None
    return next(line for line in process.stderr if word in line)


@pytest.mark.slow
def test_a_crash_ends_with_its_cause_in_one_line() -> None:
    process = serve(ENGINE_DIES)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == ""
    assert err.splitlines()[-1] == "blockdraft: vLLM ended by itself: IndexError: max(): nothing to take"
    assert err.count("noise") == 50  # all that the engine said is passed on


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.slow
def test_a_signal_ends_it_without_a_table(number: signal.Signals, code: int) -> None:
    process = serve(OBEDIENT)
    wait_for(process, "up")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code and out == ""
    said = [line for line in err.splitlines() if line.startswith("blockdraft: ")]
    assert said[0] == "blockdraft: ending the server; once more kills it" and len(said) == 1 + (code == 130)
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_kills_what_does_not_end_and_nothing_is_left() -> None:
    process = serve(DEAF)
    pids = [int(pid) for pid in wait_for(process, "pids").split()[1:]]
    process.send_signal(signal.SIGINT)
    wait_for(process, "deaf")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "" and "Traceback" not in err
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child of its parent's end")
@pytest.mark.slow
def test_a_server_ends_when_its_command_is_killed() -> None:
    process = serve(OBEDIENT.replace('print("up"', 'import os\nprint(f"pids {os.getpid()}"'))
    pid = int(wait_for(process, "pids").split()[1])
    server = psutil.Process(pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    psutil.wait_procs([server], timeout=60)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len (9) is greater [type=value_error, input_value=1]\n    For further",
            1,
            "ValidationError: max_model_len (9) is greater",
        ),
        ("vllm serve: error: unrecognized arguments: --nonsense 3", 2, "unrecognized arguments: --nonsense 3"),
        (
            "(APIServer pid=1) AttributeError: of a request, long ago\n"
            "(EngineCore pid=2) ERROR 12-03 02:14:21 [core.py:1] blockdraft.errors.InputError: layers: spread: train\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            1,
            "layers: spread: train",
        ),
        (
            "(APIServer pid=1) AttributeError: of a request, long ago\n"
            "(APIServer pid=1) WARNING 12-03 02:14:21 [client.py:1] MPClient: engine core exited unexpectedly\n"
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
            0,
            "a process of its engine ended unexpectedly (out of memory, or killed)",
        ),
        ("loading\n", -9, "it was ended by signal 9 (out of memory, or killed)"),
        ("one\ntwo\n\nnanobind: leaked\n - leaked type", 3, "two"),
        ("", 3, "it said nothing"),
        ("ValueError: " + "x" * 5000, 1, "ValueError: " + "x" * 300 + " ..."),
    ],
)
def test_the_cause_is_found_in_what_the_engine_said(log: str, code: int, says: str) -> None:
    assert cause(log.splitlines(), code) == says


def test_an_engine_that_does_not_come_up_is_reported_with_its_cause(tmp_path: Path) -> None:
    plan = Launch([sys.executable, "-c", "raise ValueError('no room')"], {}, "", f"http://127.0.0.1:{free_port()}")
    with (
        pytest.raises(BlockdraftError, match="ended before it was ready: ValueError: no room"),
        running(plan, tmp_path / "log.txt"),
    ):
        pass
