"""Several processes against one: the same curve, the same weights, and the same end wherever a run is broken off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.training.processes import ALONE
from blockdraft.training.run_folder import LAST

TESTS = Path(__file__).parent.parent
SCRIPT = Path(__file__).parent / "together.py"
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


# --- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_two_processes_train_as_one_does(tmp_path: Path, method: str) -> None:
    """As one process with twice the rows a step: copied and sharded, with an uneven last step."""
    optimizer = "adamw" if method == "dflare" else "muon"
    runs = {"one": (1, "copied", 4), "copied": (2, "copied", 2), "sharded": (2, "sharded", 2)}
    curves, weights = {}, {}
    for name, (count, kind, accum) in runs.items():
        (tmp_path / name).mkdir()
        arguments = [str(SCRIPT), str(tmp_path / name), method, optimizer, kind, str(accum)]
        command = torchrun(count, *arguments) if count > 1 else [sys.executable, *arguments]
        code, _, err = ran(command)
        assert code == 0, err
        curves[name] = json.loads((tmp_path / name / "curve.json").read_text())
        weights[name] = load_file(tmp_path / name / "run" / LAST / "model.safetensors")
    wanted = curves["one"]
    assert len(wanted["curve"]) >= 3
    for name in ("copied", "sharded"):
        for (loss, _, slots), (right, _, right_slots) in zip(curves[name]["curve"], wanted["curve"], strict=True):
            assert loss == pytest.approx(right, rel=1e-5) and slots == right_slots
        assert curves[name]["history"] == pytest.approx(wanted["history"], rel=0.02)
        for tensor, value in weights[name].items():
            apart = (value - weights["one"][tensor]).norm() / weights["one"][tensor].norm().clamp_min(1e-6)
            assert float(apart) < 0.01, tensor
    assert [entry[0] for entry in curves["copied"]["curve"]] == pytest.approx(
        [entry[0] for entry in curves["sharded"]["curve"]], rel=1e-5
    )


def test_one_process_sends_nothing() -> None:
    values = (1, 2.5, torch.ones(2), None)
    assert ALONE.summed(values) is values and not ALONE.any(False) and ALONE.share([1, 2]) == [1, 2]
    assert [float(t) for t in ALONE.in_turns([torch.ones(()), torch.zeros(())], lambda t: t + 1)] == [2, 1]
