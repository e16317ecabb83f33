"""Can vLLM 0.32 give a draft the hidden states of a verifier? Answered before an engine is started, without vLLM.

What the engine's own classes can do stands in `engine_models`, a table made from vLLM's sources. The families in
`PATCHED` get what they lack from the plugin (`vllm_plugin.hidden_states`). What the engine does not know itself it
hands to transformers' class, if that allows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.files import read_json
from blockdraft.vllm_plugin.engine_models import BACKEND, NO_STATES, STATES

T5GEMMA2 = "T5Gemma2ForConditionalGeneration"  # a model that the plugin brings along
ENGINE = "vLLM 0.32"


@dataclass(frozen=True, slots=True)
class Family:
    """A family whose classes in the engine are patched.

    Attributes:
        module: below vllm.model_executor.models.
        model: the class that the engine looks up.
        decoder: the class with the loop over layers; None where that gives hidden states already.
    """

    module: str
    model: str
    decoder: str | None


# Each is here because a test in tests/serving/test_served_families.py has served it.
PATCHED = {
    "GemmaForCausalLM": Family("gemma", "GemmaForCausalLM", "GemmaModel"),
    "Gemma3ForCausalLM": Family("gemma3", "Gemma3ForCausalLM", "Gemma3Model"),
    "Glm4ForCausalLM": Family("glm4", "Glm4ForCausalLM", None),
    "NemotronForCausalLM": Family("nemotron", "NemotronForCausalLM", "NemotronModel"),
    "MixtralForCausalLM": Family("mixtral", "MixtralForCausalLM", "MixtralModel"),
    "OlmoeForCausalLM": Family("olmoe", "OlmoeForCausalLM", "OlmoeModel"),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel"),
}


# Served in a test with a draft, every proposed block the trainer's: tests/serving/test_served_families.py, and Llama.
TESTED = frozenset(
    f"{name}ForCausalLM"
    for name in ("Gemma", "Gemma3", "Gemma4", "Glm4", "Llama", "Mistral", "Mixtral", "Nemotron", "Olmo2", "Olmoe",
                 "Phi3", "Qwen2Moe", "Qwen3", "SmolLM3")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    """What the engine does with a draft for one architecture.

    Attributes:
        served: whether it serves one.
        how: "native", "patched" (by our plugin), "backend" (transformers' class inside the engine), "no hidden states"
            or "unknown".
        first_tap: the lowest tap that it gives; 0 is the embeddings.
        text: for a cell of a table.
    """

    served: bool
    how: str
    first_tap: int
    text: str


_NATIVE = Support(True, "native", 0, "yes, by vLLM's class")
_PATCHED = Support(True, "patched", 0, "yes, with the plugin's patch")
_OWN = Support(True, "patched", 0, "yes, with the plugin's model (tested)")
_BACKEND = Support(True, "backend", 1, "yes, by its Transformers backend, without tap 0")
_NO_STATES = Support(False, "no hidden states", 0, "no: vLLM's class gives no hidden states")
_UNKNOWN = Support(False, "unknown", 0, "no: vLLM does not have it")


def support_of(architecture: str) -> Support:
    """What vLLM 0.32 with our plugin does with a draft for an architecture, as config.json names it."""
    found = _support_of(architecture)
    return dataclasses.replace(found, text=f"{found.text} (tested)") if architecture in TESTED else found


def _support_of(architecture: str) -> Support:
    if architecture == T5GEMMA2:
        return _OWN
    if architecture in PATCHED:
        return _PATCHED
    if architecture in STATES:
        return _NATIVE
    if architecture in NO_STATES:
        return _NO_STATES
    return _BACKEND if architecture in BACKEND or _runs_in_backend(architecture) else _UNKNOWN


def _runs_in_backend(architecture: str) -> bool:
    """Whether the engine would run transformers' own class of a model it does not have: the engine's rule."""
    model: Any = getattr(transformers, architecture, None)
    if not (isinstance(model, type) and issubclass(model, transformers.PreTrainedModel)):
        return False
    return bool(model.is_backend_compatible() or model._can_set_attn_implementation())


def architectures_of(verifier: str, otherwise: str) -> list[str]:
    """What the engine looks up for a verifier: the names in its config.json.

    Args:
        otherwise: the class that it was trained with, for a verifier without a folder here or without such names.
    """
    path = Path(verifier) / "config.json"
    named = read_json(path, "--verifier-name-or-path").get("architectures") if path.is_file() else None
    return [str(name) for name in named] if isinstance(named, list) and named else [otherwise]


def support_of_verifier(verifier: str, otherwise: str) -> tuple[str, Support]:
    """The architecture that the engine takes for a verifier, and what it does with a draft for it.

    Of several names the engine takes the first that it has.
    """
    names = architectures_of(verifier, otherwise)
    found = [(name, support_of(name)) for name in names]
    return next((each for each in found if each[1].how not in ("backend", "unknown")), found[0])


def require_hidden_states(verifier: str, trained_with: str, target_layer_ids: Sequence[int]) -> Support:
    """Reject a verifier whose hidden states the engine cannot give, before it is started.

    Args:
        trained_with: architecture in the contract (`architectures_of`).
    """
    architecture, support = support_of_verifier(verifier, trained_with)
    if not support.served:
        what = "gives no hidden states of it" if support.how == "no hidden states" else "does not have this model"
        raise InputError(
            "verifier architecture",
            architecture,
            f"{ENGINE} {what}; decode with `blockdraft generate`, or train for a family in docs/verifiers.md",
        )
    if min(target_layer_ids) < support.first_tap:
        raise InputError(
            "target_layer_ids",
            list(target_layer_ids),
            f"{ENGINE} runs {architecture} by its Transformers backend, which gives no tap below {support.first_tap}; "
            "train with others",
        )
    return support


def served_by_engine(contract: Contract, verifier: str) -> str:
    """The same as one text for a report."""
    try:
        return require_hidden_states(verifier, contract.verifier.architecture, contract.draft.target_layer_ids).text
    except InputError as error:
        return f"no: {error}"
