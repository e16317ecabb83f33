"""What the step workers share: a case, and a loop that takes one step for each line on stdin.

A worker runs in a process of its own (maybe in another environment), so that its peak memory is its own and two
workers can take turns: A B A B. Only the standard library is imported here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64  # SmolLM2-135M's layers
LAYERS, BLOCK, TAPS, MASK, PROMPT = 5, 8, (2, 9, 15, 21, 28), 4, 4
VERIFIER_LAYERS = 30


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    method: str
    seq_len: int
    anchors: int
    vocab: int
    loss: str  # "ce" (with D-PACE) or "kl" (with fixed exponential weights)
    dtype: str

    @classmethod
    def from_argv(cls) -> Case:
        return cls(**json.loads(sys.argv[1]))

    def to_arg(self) -> str:
        return json.dumps(asdict(self))


def resident(field: str) -> float:
    """Resident memory of this process in GiB: "VmRSS" now, "VmHWM" at its peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 2**20


def serve(step: Callable[[], float]) -> None:
    """Say "ready", then take a step for each line read; each answer has seconds, peak memory and the loss."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building
    before = resident("VmRSS")
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = resident("VmHWM")
        print(json.dumps({"seconds": seconds, "peak": peak, "above": peak - before, "loss": loss}), flush=True)
