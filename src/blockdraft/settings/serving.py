"""Settings of the commands that serve a draft with vLLM, or compare with what is served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from blockdraft.choices import Dtype, Thinking, Workload
from blockdraft.settings.base import check, required, setting, unparsed
from blockdraft.settings.common import (
    MODEL_HELP,
    THINKING_HELP,
    CheckpointSettings,
    OriginSettings,
    require_endpoint,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
ENGINE_HELP = "flags for vLLM itself, passed on as they stand"


@dataclass(frozen=True, kw_only=True)
class CheckSettings(OriginSettings):
    """Find what contradicts itself in a checkpoint, of ours or of others, and what does not fit its verifier."""

    checkpoint: Path = required("folder of the draft", argument=True)
    verifier_name_or_path: str | None = setting(
        None, "folder or hub id of the verifier; default: the folder that the checkpoint names, if it is there"
    )


@dataclass(frozen=True, kw_only=True)
class CardSettings(CheckSettings):
    """Write a Hugging Face model card whose every figure is read from files of the run; not while `check` fails."""

    license: str | None = setting(None, "license of the draft, such as apache-2.0; default: not recorded")
    base_model: str | None = setting(
        None, "hub id of the verifier; default: its recorded name, where that is none of a folder"
    )
    bench: Path | None = setting(None, "folder that `blockdraft bench` wrote; it is copied into the checkpoint")
    output: Path | None = setting(None, "file to write; default: README.md in the checkpoint")
    push: str | None = setting(None, "upload the checkpoint to this hub repository (private, if it is new)")
    dry_run: bool = setting(False, "write and upload nothing; list the files that --push would upload")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("base_model", "push"):
            value = getattr(self, name)
            check(
                value is None or HUB_ID.fullmatch(value) is not None, name, value, "must be a hub id, such as org/name"
            )
        check(self.push is None or self.output is None, "output", self.output, "a folder is pushed with its README.md")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(OriginSettings):
    """Serve a draft and its verifier with vLLM. Flags that are not listed here are passed on to `vllm serve`.

    With --extract, serve the hidden states of a verifier to `blockdraft train --vllm-endpoint` instead.
    """

    checkpoint: Path = required("folder of the draft; with --extract, folder or hub id of the verifier", argument=True)
    extract: bool = setting(False, "serve the hidden states of a verifier to trainers")
    target_layer_ids: tuple[int, ...] = setting(
        (), "with --extract: taps that trainers can ask for; default: those that `train` takes by itself", at_least=0
    )
    hidden_states_path: Path | None = setting(
        None, "with --extract: folder for states on their way to a trainer; default: in memory (/dev/shm)"
    )
    states_port: int = setting(
        0, "with --extract: port for trainers that do not share that folder; 0: the one behind --port", at_most=65535,
        at_least=0,
    )  # fmt: skip
    verifier_name_or_path: str | None = setting(None, "verifier; default: the one the checkpoint names")
    k: int | None = setting(None, "tokens proposed a round; default: the trained number", at_least=1, at_most=1024)
    dtype: Dtype = setting("auto", "float32, bfloat16 or auto (what the draft was trained in, where it is fast)")
    host: str = setting("127.0.0.1", "address to listen on; only this machine reaches the default")
    port: int = setting(8000, "port to listen on", at_least=1, at_most=65535)
    threads: int = setting(0, "CPU threads of the engine; 0 takes all cores", at_least=0, at_most=4096)
    thinking: Thinking = setting("trained", THINKING_HELP)
    record: Path | None = setting(None, "append every proposed block to this file (JSON lines)")
    dry_run: bool = setting(False, "print the command and its environment, start nothing")
    k_by_load: tuple[str, ...] = setting(
        (),
        "K by requests at once, as UP_TO:K; 2:7 4:3 8:0 proposes 7 for up to 2, 3 for up to 4, 0 for more",
        each=r"\d+:\d+",
    )
    self_test: bool = setting(False, "measure at how many requests at once the draft stops paying, then serve")
    data_path: Path | None = setting(None, "prompt file for --self-test (JSON lines); default: held-out records")
    engine_arguments: tuple[str, ...] = unparsed(ENGINE_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        here, elsewhere = ("target_layer_ids", "hidden_states_path", "states_port"), ("k", "record", "k_by_load",
                           "self_test", "data_path", "verifier_name_or_path")  # fmt: skip
        wrong, hint = (elsewhere, "belongs to a draft, which --extract has none of") if self.extract else (
            here, "belongs to --extract")  # fmt: skip
        for name in wrong:
            check(not getattr(self, name), name, getattr(self, name), hint)


@dataclass(frozen=True, kw_only=True)
class ParitySettings(CheckpointSettings):
    """Prove that what is served is what was trained: trainer, reference engine and vLLM on the same prompts."""

    k: tuple[int, ...] = setting(
        (), "numbers of proposed tokens; default: the trained one, or the server's", at_least=1, at_most=1024
    )
    data_path: Path | None = setting(None, "prompt file (JSON lines); default: the held-out prompts of --workload")
    workload: Workload = setting("records", "records or chat, when --data-path is not given")
    max_prompts: int = setting(8, "use the first so many prompts; 0 uses all", at_least=0)
    max_new_tokens: int = setting(64, "longest reply in tokens", at_least=1)
    max_num_seqs: int = setting(4, "requests that the engine decodes together", at_least=1, at_most=65536)
    compile: bool = setting(False, "let the engine in this process compile, as a server does; takes minutes")
    endpoint: str | None = setting(None, "a running server (http://127.0.0.1:8000); default: an engine in this process")
    model: str | None = setting(None, MODEL_HELP)
    record: Path | None = setting(None, "the file that the running server was told to --record to")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_endpoint(self)
        check(
            self.record is None or self.endpoint is not None,
            "record",
            self.record,
            "belongs to --endpoint; the engine in this process keeps its own",
        )
        check(self.endpoint is None or len(self.k) <= 1, "k", list(self.k), "a running server has one K")
