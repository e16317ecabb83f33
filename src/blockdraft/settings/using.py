"""Settings of the commands that use a draft, and of the quickstart, which does everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockdraft.choices import Engine, Workload
from blockdraft.presets import PRESETS, SpeculatorType
from blockdraft.settings.base import check, required, setting
from blockdraft.settings.common import MODEL_HELP, CheckpointSettings, SamplingSettings, VerifierSettings

CONFIDENCE_HELP = "end a proposal where its predicted survival falls under this; 0 never; needs a confidence head"


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(CheckpointSettings):
    """Exact acceptance of a draft on prompts, for every K asked for, without a decode loop."""

    data_path: Path | None = setting(None, "prompt file (JSON lines); default: the held-out prompts of --workload")
    workload: Workload = setting("records", "records or chat, when --data-path is not given")
    k: tuple[int, ...] = setting(
        (), "numbers of proposed tokens; default: 1 up to the trained one", at_least=1, at_most=1024
    )
    max_new_tokens: int = setting(128, "longest reply in tokens", at_least=1)
    max_prompts: int = setting(0, "use the first so many prompts; 0 uses all", at_least=0)
    batch_size: int = setting(16, "prompts decoded together", at_least=1)
    decode: bool = setting(False, "also decode with and without the draft: speed, identity and the same counts")
    confidence_threshold: float = setting(0.0, CONFIDENCE_HELP, at_least=0, below=1)
    vllm_endpoint: tuple[str, ...] = setting(
        (),
        "vLLM servers that have the verifier (blockdraft serve VERIFIER --extract): they decode the replies and give "
        "their hidden states",
        each=r"https?://[^\s/]+/?",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not (self.decode and self.vllm_endpoint), "decode", True, "needs the verifier here; leave it out")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(CheckpointSettings, SamplingSettings):
    """Decode prompts with a draft, in the reference engine or on a running vLLM server."""

    checkpoint: Path = required("folder of the draft", argument=True)
    prompt: tuple[str, ...] = setting((), "prompts", argument=True)
    verifier_name_or_path: str | None = setting(None, "verifier; default: the one the checkpoint names")
    data_path: Path | None = setting(None, "prompt file (JSON lines) instead of prompts on the command line")
    k: int | None = setting(
        None,
        "tokens proposed a round; default: the trained number; 0 decodes without the draft",
        at_least=0,
        at_most=1024,
    )
    batch_size: int = setting(1, "prompts decoded together", at_least=1)
    confidence_threshold: float = setting(0.0, CONFIDENCE_HELP, at_least=0, below=1)
    engine: Engine = setting("reference", "reference, or vllm: the server at --endpoint")
    endpoint: str = setting("http://127.0.0.1:8000", "where the server is, with --engine vllm")
    model: str | None = setting(None, MODEL_HELP)
    show_drafts: bool = setting(False, "color the tokens that the draft proposed and the verifier accepted")
    workload: Workload | None = setting(None, "records or chat: its held-out prompts, instead of prompts of your own")
    max_prompts: int = setting(0, "use the first so many prompts; 0 uses all", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.model is None or self.engine == "vllm", "model", self.model, "belongs to --engine vllm")


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(VerifierSettings):
    """The whole loop on a real small model: data, training, evaluation, decoding with and without the draft."""

    save_path: Path = setting(Path("runs/quickstart"), "folder for everything that is made")
    workload: Workload = setting("records", "records (short text to JSON record) or chat")
    method: SpeculatorType = setting("dflash", ", ".join(PRESETS))
    minutes: float = setting(
        6.0, "minutes of training; the rest of the loop takes about as long again", above=0, at_most=1e6
    )
    max_new_tokens: int = setting(128, "longest reply in tokens", at_least=1)
    max_prompts: int = setting(0, "train on the first so many prompts; 0 uses all", at_least=0)
    max_heldout: int = setting(0, "evaluate on the first so many held-out prompts; 0 uses all", at_least=0)
    seed: int = setting(0, "seed of everything random", at_least=0)
