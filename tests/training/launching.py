"""Starting runs of several processes, and breaking them off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
               "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # fmt: skip


def torchrun(count: int, *arguments: object, nodes: tuple[int, int, int] | None = None) -> list[str]:
    """A command that starts processes; `nodes` is (how many, which one, port of the first)."""
    place: list[object] = ["--standalone"]
    if nodes is not None:
        many, number, port = nodes
        place = ["--nnodes", many, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
    command = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", count, *arguments]
    return [str(each) for each in command]


def ran(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


BROKEN_OFF = """
import os, signal, sys
from blockdraft.cli.main import run
from blockdraft.errors import BlockdraftError
from blockdraft.training.trainer import Trainer
how, who, when = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
original = Trainer._update
def update(self, step, factor):
    if step == when and self.processes.rank == who:
        if how == "error":
            raise BlockdraftError("out of luck")
        os.kill(os.getpid(), getattr(signal, how))
    return original(self, step, factor)
Trainer._update = update
sys.exit(run(sys.argv[4:]))
"""
