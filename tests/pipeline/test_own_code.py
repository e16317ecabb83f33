"""A verifier that comes with code of its own: one line without --trust-remote-code, and it works with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers.dynamic_module_utils as modules

from blockdraft.cli.main import run
from conftest import tiny_model, tiny_tokenizer

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_code"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    model = tiny_model("llama")
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_code", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    return folder


def test_every_command_that_reads_the_verifier(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))
    named = ("--verifier-name-or-path", str(folder))
    places = {name: str(tmp_path / name) for name in ("prepared", "data", "run")}
    checkpoint = str(tmp_path / "run" / "checkpoint_best")
    half = ("--dtype", "bfloat16")
    commands = (
        ("prepare", *named, "--source", f"s={prompts}", "--prompts-only", "--save-path", places["prepared"],
         "--train-data-ratio", "0.7"),
        ("regenerate", *named, "--data-path", places["prepared"], "--save-path", places["data"], "--max-new-tokens",
         "12", "--dtype", "float32"),
        ("train", *named, "--data-path", places["data"], "--save-path", places["run"], "--epochs", "0.5", "--num-taps",
         "2", "--logger", "none", "--dtype", "float32"),
        ("check", checkpoint),
        # In half precision replies differ at near-ties, and a float32 verifier is loaded to judge them.
        ("evaluate", checkpoint, "--data-path", str(prompts), "--max-new-tokens", "24", "--decode", "--k", "3", *half),
        ("generate", checkpoint, "w1 w2", "--max-new-tokens", "4", "--dtype", "float32"),
    )  # fmt: skip
    for command in commands:
        capsys.readouterr()
        assert run([*command]) == 2, command
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "needs code that comes with it" in said, command
        assert run([*command, "--trust-remote-code"]) == 0, (command, capsys.readouterr().err)
