"""Which versions of vLLM, and which drafts in them, the plugin is for; answered without vLLM."""

from __future__ import annotations

from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.presets import vllm_method_of

KNOWN_ENGINES = ("0.32",)


def is_known(version: str) -> bool:
    """Whether the plugin was written for this version of vLLM."""
    return version.startswith(tuple(f"{known}." for known in KNOWN_ENGINES))


def unknown_engine(version: str) -> InputError:
    """The error for another version."""
    known = ", ".join(f"{each}.*" for each in KNOWN_ENGINES)
    return InputError("vllm", version, f"this blockdraft serves through vLLM {known}; install one of these")


def engine_method(contract: Contract, v1_runner: bool) -> str:
    """The engine's method for a draft: the one it has for this preset; on its V1 runner, dflash for all."""
    return "dflash" if v1_runner else vllm_method_of(contract.draft.method) or "dflash"


def require_servable(contract: Contract, v1_runner: bool) -> None:
    """Reject by name what the engine cannot compute as it was trained.

    Raises:
        InputError: a combination that the runner has no code for.
    """
    draft = contract.draft
    if len(set(draft.causal)) > 1:
        raise InputError("contract causal", draft.causal, "vLLM has one causality for all layers of a draft")
    windows = {window for window in draft.windows if window is not None}
    if len(windows) > 1:
        raise InputError("contract windows", draft.windows, "vLLM has one window for all sliding layers of a draft")
    if windows and None in draft.windows and (v1_runner or draft.method != "dflash"):
        raise InputError(
            "contract windows", draft.windows, "sliding beside full layers needs vLLM's V2 runner and method dflash"
        )
    if v1_runner:
        return
    if vllm_method_of(draft.method) is None:
        raise InputError(
            "VLLM_USE_V2_MODEL_RUNNER", "not 0", f"method {draft.method} runs on vLLM's V1 runner; set it to 0"
        )
    if draft.sequential_head not in ("none", "markov"):
        raise InputError(
            "contract sequential_head",
            draft.sequential_head,
            "vLLM's V2 runner has the markov head only; set VLLM_USE_V2_MODEL_RUNNER=0",
        )
