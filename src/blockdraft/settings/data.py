"""Settings of the commands that make data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockdraft.settings.base import at_least, required, setting
from blockdraft.settings.common import VerifierSettings


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """Unpack a GGUF verifier into an ordinary bfloat16 folder, which vLLM and transformers load."""

    source: str = required("the embedded smollm2-135m-instruct, or a .gguf file", argument=True)
    save_path: Path = required("folder to write")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Write a workload's prompts as files."""

    save_path: Path = required("folder for train.jsonl and heldout.jsonl")
    workload: str = setting("records", "records (short text to JSON record) or chat")


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings(VerifierSettings):
    """Replace replies by the verifier's own: greedy decoding of prompts, in batches."""

    data_path: Path = required("prompt file: JSON lines with `messages` (or `prompt`)")
    save_path: Path = required("folder for the replies (documents.jsonl)")
    max_new_tokens: int = setting(128, "longest reply in tokens")
    batch_size: int = setting(32, "prompts decoded together")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_new_tokens", "batch_size")
