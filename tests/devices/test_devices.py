"""Every check of `checks.py` on the test device, and on a GPU where there is one.

A device's checks run in one child process; each is a test of its own here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockdraft
from blockdraft.errors import InputError
from blockdraft.runtime import has_fast_bfloat16, resolve_device, resolve_dtype
from devices.checks import CHECKS

TESTS, SOURCE = Path(__file__).parent.parent, Path(blockdraft.__file__).parent.parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ("foreign", pytest.param("cuda", marks=NO_GPU))


@functools.cache
def outcomes(device: str) -> dict[str, str | None]:
    """What went wrong with each check on a device; None for what did not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(SOURCE)))}
    command = [sys.executable, "-m", "devices.checks", device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [check.name for check in CHECKS])
@pytest.mark.slow
def test_a_device_does_what_the_cpu_does(device: str, name: str) -> None:
    found = outcomes(device)
    assert name in found, "it was not reached"
    assert found[name] is None, found[name]


REJECTED = """
import os, torch
import devices.foreign
here = torch.randn(4, device="foreign")
square = here.expand(1, 2, 4, 4)
mixtures = {
    "sum": lambda: here + torch.randn(4),
    "where": lambda: torch.where(torch.ones(4, dtype=torch.bool), here, 0.0),
    "cat": lambda: torch.cat((here, torch.randn(4))),
    "index of a CPU tensor": lambda: torch.randn(4)[torch.tensor([0], device="foreign")],
    "written value": lambda: here.index_put_((torch.tensor([0]),), torch.randn(1)),
    "out": lambda: torch.add(here, here, out=torch.empty(4)),
    "kernel for CPUs": lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(square, square, square),
}
allowed = {
    "number": lambda: here + torch.tensor(1.0),
    "index on the CPU": lambda: here[torch.tensor([0])],
    "copy": lambda: here.cpu() + here.to("cpu"),
}
met = [name for name, mix in mixtures.items() if not raises(mix)]
failed = [name for name, do in allowed.items() if raises(do)]
view = torch.arange(6, device="foreign").view(2, 3).t()
view[0] = 9
right = view.stride() == (1, 3) and view.tolist() == [[9, 9], [1, 4], [2, 5]]
print(met, failed, right, flush=True)
os._exit(0)
"""
RAISES = """
def raises(run):
    try:
        run()
    except RuntimeError:
        return True
    return False
"""


def test_the_test_device_rejects_what_an_accelerator_rejects() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", RAISES + REJECTED], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[] [] True", done.stdout + done.stderr


@pytest.mark.parametrize("available", [False, True])
def test_auto_is_cuda_where_there_is_one(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert resolve_device("auto") == ("cuda" if available else "cpu")
    assert resolve_device("cpu") == "cpu"


def test_a_device_beyond_the_last_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == "cuda:1"
    with pytest.raises(InputError, match="--device: cuda:2: the last one on this machine is cuda:1"):
        resolve_device("cuda:2")


def test_auto_dtype_is_that_of_the_device_and_not_of_a_gpu_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = has_fast_bfloat16("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: not wanted)
    assert has_fast_bfloat16("cpu") == wanted
    assert resolve_dtype("auto", "cpu") == (torch.bfloat16 if wanted else torch.float32)
