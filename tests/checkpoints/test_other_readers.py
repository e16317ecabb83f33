"""What readers other than ours make of an exported config: rotary base, scaling and window, under either spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.checkpoints.speculators import ADDED
from blockdraft.checkpoints.store import CONFIG, load_draft, save_draft
from blockdraft.errors import InputError
from blockdraft.training.creation import draft_rotary
from blockdraft.verifiers.causal import CausalVerifier
from conftest import contract_of, rewrite, tiny_config, tiny_draft

YARN = {"rope_type": "yarn", "rope_theta": 7777.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}


def exported(verifier: CausalVerifier, folder: Path, **changes: Any) -> dict[str, Any]:
    """The config.json of a draft."""
    draft = tiny_draft(verifier, tiny_config(**changes))
    save_draft(folder, draft, contract_of(draft, verifier), torch.float32, {})
    return json.loads((folder / CONFIG).read_text())


def frequencies(layer: dict[str, Any]) -> torch.Tensor:
    return Qwen3RotaryEmbedding(Qwen3Config(**layer)).inv_freq


@pytest.mark.parametrize("rope", [PLAIN, YARN, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_rotary_positions_are_the_same_under_both_spellings(
    tiny_verifier: CausalVerifier, tmp_path: Path, rope: dict[str, Any]
) -> None:
    layer = exported(tiny_verifier, tmp_path / "draft", rope_parameters=rope)["transformer_layer_config"]
    older = {key: value for key, value in layer.items() if key != "rope_parameters"}
    newer = {key: value for key, value in layer.items() if key not in ADDED}
    assert layer["rope_theta"] == rope["rope_theta"] and "rope_theta" not in (layer["rope_scaling"] or {})
    for spelling in (older, newer, layer):
        torch.testing.assert_close(
            frequencies(spelling), frequencies({**newer, "rope_parameters": rope}), rtol=0, atol=0
        )
    assert not torch.equal(frequencies(older), frequencies({**newer, "rope_parameters": None}))


@pytest.mark.parametrize("window", [None, 12])
def test_transformers_keeps_the_window(tiny_verifier: CausalVerifier, tmp_path: Path, window: int | None) -> None:
    layer = exported(tiny_verifier, tmp_path / "draft", windows=(window, window))["transformer_layer_config"]
    assert Qwen3Config(**layer).sliding_window == window
    assert layer["use_sliding_window"] == (window is not None)


def test_exports_without_the_older_spelling_still_load(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    config = exported(tiny_verifier, tmp_path / "draft", rope_parameters=YARN)
    for key in ADDED:
        del config["transformer_layer_config"][key]
    rewrite(tmp_path / "draft", config=config)
    draft, _ = load_draft(tmp_path / "draft", tiny_verifier, torch.float32)
    assert draft.config.rope_parameters == YARN


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 10000.0), ("rope_scaling", None), ("rope_scaling", {**YARN, "factor": 2.0}),
     ("use_sliding_window", True)],
)  # fmt: skip
def test_spellings_that_differ_are_rejected(
    tiny_verifier: CausalVerifier, tmp_path: Path, key: str, value: Any
) -> None:
    config = exported(tiny_verifier, tmp_path / "draft", rope_parameters=YARN)
    config["transformer_layer_config"][key] = value
    rewrite(tmp_path / "draft", config=config)
    with pytest.raises(InputError, match=f"transformer_layer_config {key}"):
        load_draft(tmp_path / "draft", tiny_verifier, torch.float32)


@pytest.mark.parametrize(
    ("verifier", "draft"),
    [
        ({**PLAIN, "partial_rotary_factor": 0.5}, PLAIN),
        ({**PLAIN, "mrope_section": [16, 24, 24], "mrope_interleaved": True}, PLAIN),
        ({**PLAIN, "rope_type": "mrope", "mrope_section": [16, 24, 24]}, PLAIN),
        ({**PLAIN, "rope_type": "proportional", "partial_rotary_factor": 0.25}, PLAIN),
        ({**YARN, "mrope_section": [16, 24, 24]}, YARN),
        (LLAMA3, LLAMA3),
        ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
    ],
)
def test_a_draft_rotates_whole_heads_by_one_position(verifier: dict[str, Any], draft: dict[str, Any]) -> None:
    assert draft_rotary(verifier) == draft
