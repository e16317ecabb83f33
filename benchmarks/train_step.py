"""Time and peak memory of a training step (forward and backward) over a grid, beside its floor, its reference and a rival.

    python benchmarks/train_step.py                                            # the whole grid, blockdraft alone
    python benchmarks/train_step.py --peer-python peer/bin/python --methods dflash --out docs/results.md
    python benchmarks/train_step.py --vocab 262144 --anchors 64 256 --twin --head   # chunks against whole logits

Every cell is measured in processes of its own that take turns, A B A B, after one step each that is not counted; the
table has medians. "floor" is the time of the matrix products alone that a step cannot avoid (steps/floor.py).
The peer is Speculators 0.9.0 in its own environment: `pip install torch==2.13.0 speculators==0.9.0` and then remove
torchvision and torchaudio, whose PyPI builds do not import beside a CPU build of torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from report import markdown_table, today, write_section

STEPS = Path(__file__).parent / "steps"
sys.path.insert(0, str(STEPS))

from protocol import Case  # noqa: E402


class Worker:
    """A process that takes steps of one case."""

    def __init__(self, python: str, script: str, case: Case, *extra: str) -> None:
        command = [python, str(STEPS / script), case.to_arg(), *extra]
        # A pipe that nobody reads would fill and stop the worker.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._answer()
        self.seconds: list[float] = []
        self.peak = self.above = 0.0

    def _answer(self) -> str:
        """The next line of the protocol; what libraries print between is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready" or line.startswith("{"):
                return line
        self._errors.seek(0)
        raise SystemExit(self._errors.read()[-2000:])

    def step(self) -> None:
        """Take one step and record it."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        self.seconds.append(answer["seconds"])
        self.peak, self.above = answer["peak"], answer["above"]

    @property
    def time(self) -> float:
        """Median seconds of the steps after the first."""
        return median(self.seconds[1:] or self.seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


def measure(case: Case, repeats: int, peer_python: str | None, twin: bool, head: bool) -> dict[str, Worker]:
    """All workers of a case, each after 1 + `repeats` steps in turns; `head` measures head and loss alone."""
    part = ["head"] if head else []
    workers = {"ours": Worker(sys.executable, "ours.py", case, *part)}
    if case.method == "dflash" and not head:
        workers["floor"] = Worker(sys.executable, "floor.py", case)
        if peer_python:
            workers["peer"] = Worker(peer_python, "speculators.py", case)
    if twin:
        workers["twin"] = Worker(sys.executable, "ours.py", case, "plain", *part)
    try:
        for _ in range(1 + repeats):
            for worker in workers.values():
                worker.step()
    finally:
        for worker in workers.values():
            worker.close()
    return workers


def columns(peer: bool, twin: bool) -> list[str]:
    names = ["method", "row", "anchors", "vocabulary", "loss", "dtype", "s", "peak GiB", "step GiB", "s / floor"]
    if peer:
        names += ["peer s", "peer peak GiB", "time ratio", "memory ratio"]
    return names + (["twin s", "twin step GiB"] if twin else [])


def row_of(case: Case, workers: dict[str, Worker], peer: bool, twin: bool) -> list[str]:
    ours, floor, rival = workers["ours"], workers.get("floor"), workers.get("peer")
    loss = "ce, D-PACE" if case.loss == "ce" else case.loss
    cells = [case.method, f"{case.seq_len:,}", str(case.anchors), f"{case.vocab:,}", loss, case.dtype]
    cells += [f"{ours.time:.2f}", f"{ours.peak:.2f}", f"{ours.above:.2f}"]
    cells.append(f"{ours.time / floor.time:.2f}" if floor else "")
    if peer:
        ratios = (f"{rival.time / ours.time:.2f}", f"{rival.peak / ours.peak:.2f}") if rival else ("", "")
        cells += [f"{rival.time:.2f}", f"{rival.peak:.2f}", *ratios] if rival else [""] * 4
    if twin:
        cells += [f"{workers['twin'].time:.2f}", f"{workers['twin'].above:.2f}"]
    return cells


def grid(options: argparse.Namespace) -> list[Case]:
    axes: Sequence[Sequence[object]] = (
        options.methods,
        options.seq_len,
        options.anchors,
        options.vocab,
        options.loss,
        options.dtypes,
    )
    return [Case(*values) for values in itertools.product(*axes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["dflash", "dflare", "dspark"])
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--anchors", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 262_144])
    parser.add_argument("--loss", nargs="+", choices=["ce", "kl"], default=["ce", "kl"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-python", help="Python of an environment with Speculators 0.9.0")
    parser.add_argument("--head", action="store_true", help="head and loss alone, on given hidden states (ce)")
    parser.add_argument("--twin", action="store_true", help="also the plain step: whole logits, one dense mask")
    parser.add_argument("--out", type=Path, help="file whose section is replaced by the table")
    parser.add_argument("--section", default="train-step", help="name of that section")
    options = parser.parse_args()
    peer = bool(options.peer_python)
    names, rows = columns(peer, options.twin), []
    print(" | ".join(names), flush=True)
    for case in grid(options):
        workers = measure(case, options.repeats, options.peer_python, options.twin, options.head)
        rows.append(row_of(case, workers, peer, options.twin))
        print(" | ".join(rows[-1]), flush=True)
        if options.out:  # after every row: a run that is stopped keeps what it measured
            write_section(options.out, options.section, f"{heading(options)}\n\n{markdown_table(names, rows)}")


def heading(options: argparse.Namespace) -> str:
    """The command, the day and the machine."""
    from blockdraft.runtime import machine_description

    arguments = " ".join(sys.argv[1:]).replace(options.peer_python or "\0", "PEER")
    return f"`python benchmarks/train_step.py {arguments}`, {today()}; {machine_description()}."


if __name__ == "__main__":
    main()
