"""Families of verifiers that vLLM serves with a draft: every proposed block is the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockdraft.vllm_plugin import engine_models
from blockdraft.vllm_plugin.support import PATCHED, TESTED, support_of
from serving.engine_sources import classified
from serving.families import EXPERTS, HEAD, MIXED, WINDOW, Case, pair_of, require_as_trained, serve

# As Gemma has it: the engine keeps a draft's layers in one cache group where enough layers slide.
MOSTLY_SLIDING = {
    "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"], "sliding_window": WINDOW,
    "query_pre_attn_scalar": HEAD,
}  # fmt: skip
WITHOUT_EMBEDDINGS: dict[str, Any] = {"target_layer_ids": (1, 2, 4)}  # what the engine's Transformers backend can give
PARTLY_ROTATED = {"partial_rotary_factor": 0.5}
CASES = {
    "gemma3": Case("Gemma3", MOSTLY_SLIDING),
    "qwen2_moe, dflare": Case("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}, "dflare"),
    "gemma4": Case("Gemma4", {"layer_types": MIXED, "sliding_window": WINDOW}),
    "mistral, a window on all layers": Case("Mistral", {"sliding_window": WINDOW}),
    "olmo2, by the backend": Case("Olmo2", {}, "dflash", WITHOUT_EMBEDDINGS),
}
MORE = {
    "gemma3, dflare": Case("Gemma3", {**MOSTLY_SLIDING, "final_logit_softcapping": 5.0}, "dflare"),
    "gemma": Case("Gemma"),
    "glm4": Case("Glm4", PARTLY_ROTATED),
    "nemotron": Case("Nemotron", PARTLY_ROTATED),
    "mixtral": Case("Mixtral", EXPERTS),
    "olmoe": Case("Olmoe", EXPERTS),
    "qwen3": Case("Qwen3"),
    "phi3": Case("Phi3"),
    "mistral, a window on all layers, dflare": Case("Mistral", {"sliding_window": WINDOW}, "dflare"),
    "mistral without a window": Case("Mistral", {"sliding_window": None}),
    "smollm3, by the backend": Case("SmolLM3", {}, "dflare", WITHOUT_EMBEDDINGS),
}


def require_all(cases: dict[str, Case], folder: Path) -> None:
    """One child of the engine serves a draft for each."""
    pairs = {name: pair_of(case, folder / str(index)) for index, (name, case) in enumerate(cases.items())}
    for (name, pair), decoded in zip(pairs.items(), serve(list(pairs.values())), strict=True):
        require_as_trained(name, pair, decoded)


@pytest.mark.engine
def test_families_are_served_as_trained(tmp_path: Path) -> None:
    require_all(CASES, tmp_path)


@pytest.mark.engine
@pytest.mark.exhaustive
def test_more_families_are_served_as_trained(tmp_path: Path) -> None:
    require_all(MORE, tmp_path)


def test_what_is_said_to_be_tested_is() -> None:
    tested = {case.architecture for case in (*CASES.values(), *MORE.values())}
    assert tested | {"LlamaForCausalLM"} == TESTED >= PATCHED.keys()
    assert all(support_of(architecture).served for architecture in TESTED)


@pytest.mark.engine
def test_the_table_of_models_is_the_engines() -> None:
    """Written by `python tests/serving/engine_sources.py` from the sources of vLLM 0.32."""
    found = classified()
    assert (found["states"], found["no states"], found["backend"]) == (
        engine_models.STATES,
        engine_models.NO_STATES,
        engine_models.BACKEND,
    )
