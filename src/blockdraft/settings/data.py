"""Settings of the commands that make data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from blockdraft.settings.base import at_least, check, one_of, required, setting
from blockdraft.settings.common import MODEL_HELP, VERIFIER_HELP, OriginSettings, VerifierSettings, require_endpoint

TRAIN_DATA_RATIO = 0.9  # share of the texts to train on, where nothing else is said
REWRITTEN_HELP = (
    "when the chat template changes earlier replies as later turns follow: last learns the last reply only, split "
    "makes a text of each reply, reject refuses the row"
)


PROBE_HELP = (
    "with --endpoint: load the verifier here and compare a few greedy tokens with the server's; without, the data say "
    "that their author is unknown"
)


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """Unpack a GGUF verifier into an ordinary bfloat16 folder, which vLLM and transformers load."""

    source: str = required("the embedded smollm2-135m-instruct, or a .gguf file", argument=True)
    save_path: Path = required("folder to write")


@dataclass(frozen=True, kw_only=True)
class TemplateSettings:
    """How conversations become text."""

    PANEL: ClassVar[str] = "How conversations become text"

    thinking: str = setting("auto", "tell the chat template to think: on, off or auto (the template's default)")
    rewritten_history: str = setting("last", REWRITTEN_HELP)
    tools: Path | None = setting(None, "JSON list of tools, offered in every conversation that names none of its own")
    max_source_length: int = setting(2048, "longest source in tokens, for verifiers with an encoder")
    max_length: int = setting(0, "longest text in tokens; 0: 1024 where the verifier has an encoder, else 2048")

    def __post_init__(self) -> None:
        one_of(self, "thinking", ("auto", "on", "off"))
        one_of(self, "rewritten_history", ("last", "split", "reject"))
        at_least(self, 1, "max_source_length")
        at_least(self, 0, "max_length")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(TemplateSettings, OriginSettings):
    """Make training data of any mixture of sources: token ids with the replies marked, and a record of every row."""

    source: tuple[str, ...] = setting(
        (), "name=path-or-hub-id[:split][@count or weight]; may be given several times; builtin/records ships with it"
    )
    save_path: Path | None = setting(None, "folder to write; needed unless --preview is given")
    verifier_name_or_path: str = setting("smollm2-135m-instruct", VERIFIER_HELP)
    prompts_only: bool = setting(False, "drop the rows' replies: `blockdraft regenerate` is to write them")
    converter: tuple[str, ...] = setting(
        (), "source=converter where the shape is not found by itself; source=ask:reply names two columns"
    )
    num_rows: int = setting(0, "rows of the whole mixture, which weights share; 0: as many as the sources have")
    exclude_overlap: tuple[Path, ...] = setting((), "evaluation files: rows that ask what they ask are left out")
    train_data_ratio: float = setting(
        TRAIN_DATA_RATIO, "share of the texts to train on, by hash of what they ask; the rest validates"
    )
    overlong: str = setting("truncate", "texts over the limit: truncate (and count) or drop")
    max_reject_share: float = setting(0.1, "stop when more of a source's rows than this cannot be used")
    seed: int = setting(42, "seed of the draw and of the order")
    num_workers: int = setting(0, "processes that encode; 0: one for each processor")
    preview: int = setting(0, "show so many texts of each source with the learned tokens coloured; write nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.source), "source", "none", "name one, such as math=gsm8k.jsonl or demo=builtin/records")
        at_least(self, 0, "num_rows", "num_workers", "preview")
        one_of(self, "overlong", ("truncate", "drop"))
        check(0 < self.train_data_ratio < 1, "train_data_ratio", self.train_data_ratio, "must be between 0 and 1")
        share = self.max_reject_share
        check(0 <= share <= 1, "max_reject_share", share, "must be between 0 and 1")
        check(bool(self.preview or self.save_path), "save_path", "missing", "folder to write, or give --preview 3")


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings(VerifierSettings):
    """Replace the replies of prepared data by the verifier's own, in this process or through a running server."""

    data_path: Path = required("folder that `blockdraft prepare` wrote")
    save_path: Path = required("folder for the same texts with the verifier's replies")
    endpoint: str | None = setting(None, "an OpenAI-compatible server of the verifier, such as http://127.0.0.1:8000")
    model: str | None = setting(None, MODEL_HELP)
    probe: bool = setting(True, PROBE_HELP)
    max_new_tokens: int = setting(128, "longest reply in tokens")
    temperature: float = setting(0.0, "0 decodes greedily")
    top_k: int = setting(0, "sample among the k likeliest tokens; 0 among all")
    top_p: float = setting(1.0, "sample among the likeliest tokens that hold this much probability")
    seed: int = setting(0, "seed of everything random")
    batch_size: int = setting(32, "prompts decoded together, in process")
    drop_truncated: bool = setting(False, "leave out texts whose last reply reached --max-new-tokens")
    concurrency: int = setting(16, "requests at a time, with --endpoint")
    request_timeout: float = setting(180.0, "seconds for one request, with --endpoint")
    max_retries: int = setting(20, "tries after the first for one request, with --endpoint")
    max_reject_share: float = setting(0.1, "stop when the server refuses more of the conversations than this")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_endpoint(self)
        check(self.probe or self.endpoint is not None, "no_probe", "given", "belongs to --endpoint")
        at_least(self, 1, "max_new_tokens", "batch_size", "concurrency")
        at_least(self, 0, "temperature", "top_k", "max_retries")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        check(self.request_timeout > 0, "request_timeout", self.request_timeout, "must be above 0")
        share = self.max_reject_share
        check(0 <= share <= 1, "max_reject_share", share, "must be between 0 and 1")
