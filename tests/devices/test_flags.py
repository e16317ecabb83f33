"""--device, in every command that has it: a wrong one is one line and code 2, before any work."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from blockdraft.cli.main import run
from blockdraft.cli.verbs import VERBS
from blockdraft.settings import ComputeSettings

WITH_DEVICE = [name for name, verb in VERBS.items() if issubclass(verb.settings, ComputeSettings)]
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
WRONG = [
    pytest.param("cuda", "finds none on this machine; give auto or cpu", marks=NO_CUDA),
    ("cuda:99", "on this machine"),
    ("foo", "torch knows no such device; give auto, cpu, cuda or cuda:1"),
    ("meta", "finds none on this machine"),
    ("", "must not be empty"),
]


def test_every_command_that_computes_has_the_flag_and_takes_what_is_there() -> None:
    assert {"quickstart", "regenerate", "states", "train", "evaluate", "generate", "parity"} == set(WITH_DEVICE)
    for name in WITH_DEVICE:
        (device,) = [field for field in dataclasses.fields(VERBS[name].settings) if field.name == "device"]
        assert device.default == "auto"
    others = set(VERBS) - set(WITH_DEVICE)
    assert not [name for name in others if "device" in {f.name for f in dataclasses.fields(VERBS[name].settings)}]


@pytest.mark.parametrize("name", WITH_DEVICE)
@pytest.mark.parametrize(("device", "says"), WRONG)
def test_a_wrong_device_is_one_line_before_any_work(
    name: str, device: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [name, "--device", device]
    for field in dataclasses.fields(VERBS[name].settings):
        path = str(tmp_path / field.name)  # nothing is there: whoever reads first, fails with another message
        if field.default is dataclasses.MISSING:
            arguments += [path] if field.metadata["argument"] else [f"--{field.name.replace('_', '-')}", path]
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 2 and not captured.out
    assert captured.err.startswith(f"blockdraft: --device: {device or repr(device)}: ") and says in captured.err
    assert captured.err.count("\n") == 1 and not list(tmp_path.iterdir())
