"""Training, evaluation and decoding on a device that rejects tensors of the CPU, as every accelerator does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blockdraft.cli.main import run
from blockdraft.cli.verbs import VERBS
from blockdraft.settings import ComputeSettings
from devices.checks import CHECKS

ROOT = Path(__file__).parent.parent
WITH_DEVICE = [verb for verb, each in VERBS.items() if issubclass(each.settings, ComputeSettings)]
NOT_THERE = {"cuda": "finds none on this machine", "foo": "torch knows no such device", "cuda:99": "none"}
NEEDED = {
    "regenerate": ["--data-path", "none", "--save-path", "none"],
    "states": ["--data-path", "none", "--hidden-states-path", "none"],
    "train": ["--data-path", "none", "--save-path", "none"],
    "evaluate": ["none"],
    "generate": ["none", "text"],
    "parity": ["none"],
}


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    """What went wrong in each check, of one child process: the test device changes torch for good."""
    done = subprocess.run([sys.executable, "-m", "devices.checks", "foreign"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_on_the_test_device(problems: dict[str, str | None], name: str) -> None:
    assert problems[name] is None, problems[name]


@pytest.mark.parametrize("verb", WITH_DEVICE)
@pytest.mark.parametrize("device", NOT_THERE)
def test_a_device_that_is_not_there(
    verb: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line before any work, in every verb that computes."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert run([verb, *NEEDED.get(verb, []), "--device", device]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert (
        len(lines) == 1 and lines[0].startswith(f"blockdraft: --device: {device}: ") and NOT_THERE[device] in lines[0]
    )
    assert not list(tmp_path.iterdir())


def test_the_device_is_chosen_by_itself_everywhere() -> None:
    assert {"train", "evaluate", "generate", "parity", "regenerate", "states", "quickstart"} <= set(WITH_DEVICE)
    assert all(VERBS[verb].settings.__dataclass_fields__["device"].default == "auto" for verb in WITH_DEVICE)
