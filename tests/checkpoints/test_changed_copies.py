"""A copy of a checkpoint that was changed is caught when it is loaded or checked, however carefully it was changed.

Each change is made in every place that states the fact, so that nothing contradicts anything; only the signature of the
export remains. What a *faulty exporter* signs itself is the business of parity (tests/serving/test_other_drafts.py).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.speculators import DIGEST
from blockdraft.checkpoints.store import CONFIG, WEIGHTS, load_draft, read_checkpoint, save_draft
from blockdraft.cli.main import run
from blockdraft.errors import InputError
from blockdraft.verifiers.causal import CausalVerifier
from conftest import contract_of, rewrite, tiny_config, tiny_draft

Config = dict[str, Any]


def both(top: str, inner: str, value: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config[top] = list(value) if isinstance(value, (list, tuple)) else value
        config["blockdraft"]["draft"][inner] = value

    return change


def rotary(config: Config) -> None:
    for place in (config["blockdraft"]["draft"], config["transformer_layer_config"]):
        place["rope_parameters"]["rope_theta"] = 7777.0
    config["transformer_layer_config"]["rope_theta"] = 7777.0


def causality(config: Config) -> None:
    config["sliding_window_non_causal"] = False
    config["blockdraft"]["draft"]["causal"] = [True, True]


def window(config: Config) -> None:
    config["transformer_layer_config"]["layer_types"] = ["sliding_attention"] * 2
    config["transformer_layer_config"]["sliding_window"] = 20
    config["transformer_layer_config"]["use_sliding_window"] = True
    config["blockdraft"]["draft"]["windows"] = [20, 20]


def longest(config: Config) -> None:
    for place in (config["blockdraft"]["draft"], config["transformer_layer_config"]):
        place["max_position_embeddings"] = 512


def block(config: Config) -> None:
    config["block_size"] = config["blockdraft"]["draft"]["block_size"] = 9


def contract(field: str, value: Any) -> Callable[[Config], None]:
    return lambda config: config["blockdraft"].update({field: value})


def norm_epsilon(config: Config) -> None:
    for place in (config["blockdraft"]["draft"], config["transformer_layer_config"]):
        place["rms_norm_eps"] = 1e-3


STATEMENTS: dict[str, Callable[[Config], None]] = {
    "tap id": both("aux_hidden_state_layer_ids", "target_layer_ids", [0, 1, 4]),
    "mask id": both("mask_token_id", "mask_token_id", 99),
    "causality": causality,
    "rotary base": rotary,
    "window": window,
    "context length": longest,
    "block size": block,
    "epsilon of norms": norm_epsilon,
    "compute dtype": contract("compute_dtype", "bfloat16"),
    "soft cap": contract("logit_softcap", 30.0),
    "norms of the verifier": lambda config: config["blockdraft"]["verifier"].update(norms_hash="0" * 16),
    "tokenizer of the verifier": lambda config: config["blockdraft"]["verifier"].update(tokenizer_hash="0" * 16),
}
WEIGHTS_CHANGED = ("norm.weight", "layers.1.self_attn.k_norm.weight", "hidden_norm.weight", "fc.weight",
                   "layers.0.mlp.down_proj.weight", "markov_head.markov_w1.weight", "confidence_head.proj.bias",
                   "lm_head.weight", "d2t", "t2d")  # fmt: skip


@pytest.fixture(scope="module")
def original(tiny_verifier: CausalVerifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed") / "original"
    draft = tiny_draft(tiny_verifier, tiny_config("dspark", draft_vocab_size=40, sample_from_anchor=False))
    save_draft(folder, draft, contract_of(draft, tiny_verifier), torch.float32, {})
    return folder


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def refused(folder: Path, verifier: CausalVerifier, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which loading and `check` reject."""
    with pytest.raises(InputError) as error:
        load_draft(folder, verifier, torch.float32)
    assert run(["check", str(folder), "--json"]) in (1, 2)  # 2: no config.json that can be read
    said = capsys.readouterr()
    lines = json.loads(said.out)["failures"] if said.out else said.err.strip().splitlines()
    line = next(each for each in lines if str(error.value) in each)
    assert "\n" not in line
    return f"{error.value} {line}"


def test_the_original_is_whole(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(original), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "dspark" and result["tensors"] == len(load_file(original / WEIGHTS))


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_changed_statement_is_caught(
    copied: Path, tiny_verifier: CausalVerifier, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = json.loads((copied / CONFIG).read_text())
    before = copy.deepcopy(config)
    STATEMENTS[name](config)
    assert config != before
    rewrite(copied, config=config, sign=False)
    assert refused(copied, tiny_verifier, capsys)


@pytest.mark.parametrize("name", WEIGHTS_CHANGED)
def test_a_changed_tensor_is_caught(
    copied: Path, tiny_verifier: CausalVerifier, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    tensors = load_file(copied / WEIGHTS)
    flat = tensors[name].flatten()
    if flat.dtype == torch.bool:
        flat[0] = ~flat[0]
    else:
        flat[0] += 1
    rewrite(copied, {**tensors, name: flat.view(tensors[name].shape)}, sign=False)
    assert refused(copied, tiny_verifier, capsys)


def test_a_file_without_a_signature_is_caught(copied: Path) -> None:
    config = json.loads((copied / CONFIG).read_text())
    del config[DIGEST]
    (copied / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError, match="checkpoint blockdraft_digest: missing"):
        read_checkpoint(copied)


def test_a_truncated_file_is_caught(copied: Path) -> None:
    content = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="damaged"):
        read_checkpoint(copied)


def test_a_moved_verifier_is_the_same_verifier(copied: Path) -> None:
    config = json.loads((copied / CONFIG).read_text())
    config["blockdraft"]["verifier"]["name"] = config["speculators_config"]["verifier"]["name_or_path"] = "/elsewhere"
    rewrite(copied, config=config, sign=False)
    assert read_checkpoint(copied).contract.verifier.name == "/elsewhere"
