"""What vLLM cannot give is said before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockdraft.checkpoints.store import save_draft
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import MASK, call, contract_of, free_port, own_replies, tiny_config, tiny_draft, tiny_verifier_of

pytestmark = pytest.mark.engine


def renamed(folder: Path, architecture: str) -> Path:
    """A pair whose verifier's config.json names another class."""
    save_folder(tiny_verifier_of("llama"), folder / "verifier")
    verifier = load_verifier(str(folder / "verifier"), torch.float32)
    draft = tiny_draft(verifier, tiny_config("dflash"))
    save_draft(folder / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    path = folder / "verifier" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    return folder / "draft"


@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "OPTForCausalLM"])
def test_a_verifier_without_hidden_states_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str
) -> None:
    checkpoint = renamed(tmp_path, architecture)
    code, _, err = call(capsys, "serve", checkpoint, "--port", free_port(), "--dry-run")
    assert code == 2
    assert err.count("\n") == 1 and f"verifier architecture: {architecture}: vLLM 0.32 gives no hidden states" in err
    code, out, _ = call(capsys, "check", checkpoint, "--json")
    assert code == 0
    assert json.loads(out)["served by vLLM"].startswith(f"no: verifier architecture: {architecture}")


def test_a_verifier_with_hidden_states_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = renamed(tmp_path, "LlamaForCausalLM")
    assert call(capsys, "serve", checkpoint, "--port", free_port(), "--dry-run")[0] == 0
    code, out, _ = call(capsys, "check", checkpoint, "--json")
    assert (code, json.loads(out)["served by vLLM"]) == (0, "yes, by vLLM's class (tested)")


@pytest.mark.parametrize(("architecture", "warned"), [("StableLmForCausalLM", True), ("LlamaForCausalLM", False)])
def test_training_for_it_is_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, warned: bool
) -> None:
    """Training and the reference engine work all the same."""
    renamed(tmp_path, architecture)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{2 * i}"}) + "\n" for i in range(6)))
    verifier = load_verifier(str(tmp_path / "verifier"), torch.float32)
    with torch.no_grad():  # the mask token is never said
        verifier.head_VE[97:] = 0
    own_replies(verifier, f"s={prompts}", tmp_path / "prepared", tmp_path / "data", 8)
    code, _, err = call(
        capsys, "train", "--verifier-name-or-path", tmp_path / "verifier", "--data-path", tmp_path / "data",
        "--save-path", tmp_path / "run", "--mask-token-id", MASK, "--dry-run",
    )  # fmt: skip
    assert code == 0, err
    assert ("warning: this draft cannot be served by vLLM (verifier architecture: StableLm" in err) == warned
