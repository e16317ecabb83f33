"""Training from ready hidden states holds parts of the verifier, and comes to the same bits as with all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockdraft.data.table import read_examples
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.run_folder import LAST
from blockdraft.verifiers.base import States
from blockdraft.verifiers.loading import save_folder
from blockdraft.verifiers.parts import read_parts
from conftest import MASK, call, tiny_tokenizer, tiny_verifier_of
from verifiers.families import Family, tiny_model
from verifiers.trimmed import keep_parts

DRAFT = ("--epochs", 1, "--num-layers", 1, "--target-layer-ids", 1, 3, "--mask-token-id", MASK, "--logger", "none",
         "--dtype", "float32", "--device", "cpu", "--loss-fn", "kl", "--total-seq-len", 64)  # fmt: skip


def done(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def data_of(verifier: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    rows = [{"prompt": f"w{i} w{i + 7}", "response": f"w{2 * i} w5 w6 w7 w8 " * (i % 4 + 2)} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done(capsys, "prepare", "--verifier-name-or-path", verifier, "--source", f"s={folder / 'rows.jsonl'}",
         "--save-path", folder / "data", "--num-workers", 1)  # fmt: skip
    return folder / "data"


def test_parts_train_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_folder(tiny_verifier_of("gemma3"), tmp_path / "v")
    keep_parts(tmp_path / "v", tmp_path / "cut")
    data = data_of(tmp_path / "v", tmp_path, capsys)

    def trained(verifier: str, name: str, *more: object) -> dict[str, Any]:
        return done(capsys, "train", "--verifier-name-or-path", tmp_path / verifier, "--data-path", data,
                    "--save-path", tmp_path / name, *DRAFT, *more)  # fmt: skip

    ready = ("--hidden-states-path", tmp_path / "states", "--on-missing", "raise")
    whole = trained("v", "whole")
    assert whole["steps"] >= 3
    done(capsys, "states", "--verifier-name-or-path", tmp_path / "v", "--data-path", data, *ready[:2], *DRAFT)
    trained("v", "parts", *ready)
    cut = trained("cut", "cut-parts", *ready)
    weights = {name: (tmp_path / name / LAST / "model.safetensors").read_bytes()
               for name in ("whole", "parts", "cut-parts")}  # fmt: skip
    assert weights["parts"] == weights["whole"] and weights["cut-parts"] == weights["whole"]
    contracts = [json.loads((tmp_path / name / LAST / "config.json").read_text())["blockdraft"] for name in weights]
    assert contracts[1] == contracts[0]
    assert contracts[2]["verifier"]["matrices_digest"] is None
    # The draft belongs to the whole verifier, which says what was not compared.
    code, _, err = call(capsys, "evaluate", cut["checkpoint"], "--verifier-name-or-path", tmp_path / "v", "--device",
                        "cpu", "--data-path", tmp_path / "rows.jsonl", "--k", 3, "--max-new-tokens", 4)  # fmt: skip
    assert code == 0 and "were not compared, only its norms: the checkpoint has no digest of them" in err, err
    code, _, err = call(capsys, "train", "--verifier-name-or-path", tmp_path / "cut", "--data-path", data,
                        "--save-path", tmp_path / "none", *DRAFT)  # fmt: skip
    assert code == 2 and "tensors missing in its weights" in err.splitlines()[-1]


def test_a_family_that_is_not_decoded_here_is_trained_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its layers are linear attention; the states are its own, made elsewhere."""
    tiny_model(Family("qwen3_next")).save_pretrained(tmp_path / "v")
    tiny_tokenizer().save_pretrained(tmp_path / "v")
    data = data_of(tmp_path / "v", tmp_path, capsys)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32).eval()
    parts: Any = read_parts(str(tmp_path / "v"), torch.float32, "cpu")

    @torch.no_grad()
    def states(sequences: Sequence[Tensor], taps: Sequence[int], _: object) -> list[States]:
        found = []
        for sequence in sequences:
            hidden = own.model(sequence[None], output_hidden_states=True, use_cache=False).hidden_states
            found.append(States(torch.stack([hidden[tap][0] for tap in taps], dim=-2), hidden[-1][0]))
        return found

    parts.states = states
    examples = read_examples(data, "--data-path")
    HiddenStateFiles(tmp_path / "states", InProcess(parts, (1, 3), with_final=True)).prepare(examples)
    train = ("train", "--verifier-name-or-path", tmp_path / "v", "--data-path", data, "--save-path", tmp_path / "run")
    ready = ("--hidden-states-path", tmp_path / "states", "--on-missing", "raise")
    made = done(capsys, *train, *DRAFT, *ready)
    contract = json.loads((Path(made["checkpoint"]) / "config.json").read_text())["blockdraft"]
    assert contract["verifier"]["architecture"] == "Qwen3NextForCausalLM"
    assert contract["verifier"]["matrices_digest"] is not None
    code, _, err = call(capsys, *train, *DRAFT, "--restart")
    assert code == 2 and "is not supported: layers of type linear_attention" in err.splitlines()[-1]
