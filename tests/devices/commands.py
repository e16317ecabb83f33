"""Commands with --device, from prompts to text, and the benchmark of a step."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from blockdraft.cli.main import run
from blockdraft.verifiers.loading import save_folder
from devices.stage import Check, verifier_on

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def _call(*arguments: object) -> Any:
    """Run a command and give the result that it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*(str(argument) for argument in arguments), "--json"])
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())


def _by_commands(device: str, folder: Path) -> None:
    """regenerate, states, train, evaluate and generate on the device; its text is the CPU's."""
    save_folder(verifier_on("cpu"), folder / "verifier")
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    verifier = ("--verifier-name-or-path", folder / "verifier")
    _call(
        "prepare", *verifier, "--source", f"s={folder / 'prompts.jsonl'}", "--prompts-only", "--train-data-ratio", 0.7,
        "--save-path", folder / "prompts",
    )  # fmt: skip
    digests = []
    for where in (device, "cpu"):
        made = _call(
            "regenerate", *verifier, "--data-path", folder / "prompts", "--save-path", folder / f"data-{where}",
            "--max-new-tokens", 12, "--device", where, "--dtype", "float32",
        )  # fmt: skip
        digests.append(made["digest"])
    assert digests[0] == digests[1]
    common = (*verifier, "--data-path", folder / f"data-{device}", "--device", device, "--dtype", "float32",
              "--hidden-states-path", folder / "states", "--target-layer-ids", 1, 2, 4,
              "--config", "quickstart.train")  # fmt: skip
    assert _call("states", *common)["made"] == 12
    trained = _call("train", *common, "--save-path", folder / "run", "--epochs", 1, "--logger", "none")
    assert trained["best_acceptance_length"] >= 1
    using = ("--device", device, "--dtype", "float32", "--max-new-tokens", 8)
    proof = _call(
        "evaluate", trained["checkpoint"], "--data-path", folder / "prompts.jsonl", "--k", 7, "--decode", *using
    )
    found = proof["decoding"]["7"]
    assert found["identical"] == found["same_rounds_as_one_pass"] == 12
    assert proof["machine"].startswith(device) or device != "foreign"
    texts = [_call("generate", trained["checkpoint"], "w3 w4", *using, "--device", where)["replies"]
             for where in (device, "cpu")]  # fmt: skip
    assert texts[0][0]["tokens"] == texts[1][0]["tokens"]


def _benchmark(device: str, folder: Path) -> None:
    """The benchmark of a step with a T5Gemma 2."""
    sys.path.insert(0, str(BENCHMARKS))
    import t5gemma2_step

    small = {"VOCABULARY": 2000, "WIDTH": 64, "HEADS": 4, "HEAD_DIM": 16, "INTERMEDIATE": 64, "LAYERS": 6, "SOURCE": 40,
             "TARGET": 30, "ANCHORS": 8, "DRAFT_VOCABULARY": 500, "DRAFT_LAYERS": 2, "TAPS": (1, 3, 6)}  # fmt: skip
    out = folder / "results.md"
    arguments = ["t5gemma2_step.py", "--device", device, "--dtype", "bfloat16", "--out", str(out)]
    with (
        mock.patch.multiple(t5gemma2_step, **small),
        mock.patch.object(sys, "argv", arguments),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        t5gemma2_step.main()
    assert "peak of a step" in out.read_text() and "estimate" not in out.read_text()


CHECKS = (Check("from prompts to text by commands", _by_commands), Check("the benchmark of a step", _benchmark))
