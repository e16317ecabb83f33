"""Settings of `blockdraft train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockdraft.choices import Dtype, Logger, OnGenerate, OnMissing, Optimizer, Schedule, Switch
from blockdraft.durations import seconds_of
from blockdraft.settings.base import check, required, setting
from blockdraft.settings.common import VerifierSettings
from blockdraft.settings.draft import DraftSettings, ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class TrainSettings(ObjectiveSettings, DraftSettings, VerifierSettings):
    """Train a draft on the verifier's own replies."""

    data_path: Path = required("folder that `blockdraft regenerate` or `prepare` wrote", identifies=False)
    save_path: Path = required("folder for the checkpoint and the training state", identifies=False)

    from_pretrained: Path | None = setting(
        None,
        "checkpoint to start from, of the same verifier: its weights and its shape, whatever the flags of a draft say",
        identifies=False,
    )

    epochs: float = setting(6.0, "passes over the data; a fraction is allowed", above=0, at_most=1e6)
    total_seq_len: int = setting(4096, "tokens of a packed row; one row is one step", at_least=2, at_most=2**24)
    max_anchors: int = setting(512, "anchored blocks drawn from a row at each step; 0 takes every position", at_least=0)
    optimizer: Optimizer = setting("muon", "muon (matrices; AdamW for the rest) or adamw")
    lr: float = setting(6e-4, "peak learning rate of AdamW", above=0, at_most=100)
    muon_lr: float = setting(3e-3, "peak learning rate of Muon", above=0, at_most=100)
    weight_decay: float = setting(0.0, "decoupled weight decay", at_least=0, at_most=100)
    scheduler_type: Schedule = setting("cosine", "cosine, linear or constant, after warm-up")
    scheduler_warmup_ratio: float = setting(0.04, "share of the steps that warm up", at_least=0, below=1)
    max_grad_norm: float = setting(1.0, "clip the gradient norm; 0 does not clip", at_least=0)
    grad_accum: int = setting(1, "rows of a step in each process; the last step takes what is left", at_least=1)
    fsdp_shard: bool = setting(
        False,
        "under torchrun: divide weights, gradients and moments among the processes (FSDP2), not only the rows",
        identifies=False,
    )
    noise_std: float = setting(0.0, "half-width of uniform noise on the taps while training", at_least=0, at_most=100)
    train_data_ratio: float = setting(
        0.0, "fraction of the examples to train on, the rest is the validation set; 0: as prepared", at_least=0, below=1
    )
    states_memory_gib: float = setting(
        4.0, "hidden states kept in memory between epochs; beyond it they are read or made anew", at_least=0
    )
    hidden_states_path: Path | None = setting(
        None,
        "folder of hidden states on disk, as blockdraft states makes it; default: made in process as they are needed",
        identifies=False,
    )
    vllm_endpoint: tuple[str, ...] = setting(
        (),
        "vLLM servers that make hidden states (blockdraft serve VERIFIER --extract), http://127.0.0.1:8000; "
        "several are asked in turn; of the verifier only embedding, output head and final norm are loaded",
        identifies=False,
        each=r"https?://[^\s/]+/?",
    )
    max_retries: int = setting(
        20, "how often a request to a server is sent again before the run ends", at_least=0, identifies=False
    )
    request_timeout: float = setting(180.0, "seconds that such a request may take", above=0, identifies=False)
    num_workers: int = setting(
        8, "requests to servers at once, in each process", at_least=1, at_most=1024, identifies=False
    )
    prefetch: int = setting(
        4, "packed rows whose states are asked of servers ahead of the step", at_least=1, at_most=1024, identifies=False
    )
    on_missing: OnMissing = setting(
        "generate",
        "examples without states there: generate, skip, warn (skip and name them) or raise",
        identifies=False,
    )
    on_generate: OnGenerate = setting(
        "cache", "states that are generated: cache (keep them in the folder) or delete", identifies=False
    )
    compile: Switch = setting("auto", "torch.compile of the feed-forward layers: on, off or auto (on CUDA)")
    seed: int = setting(0, "seed of everything random", at_least=0)

    checkpoint_freq: float = setting(
        1.0, "epochs between validations and saves of the resumable state; 0.1 is every tenth of one", above=0,
        identifies=False,
    )  # fmt: skip
    keep: int = setting(2, "resumable states kept, the newest", at_least=1, identifies=False)
    time_limit: str | None = setting(
        None,
        "stop and save after so long (3h30m, 90m, or 5400 seconds) with exit code 75; the same command goes on",
        identifies=False,
    )
    log_freq: int = setting(10, "steps between log entries", at_least=1, identifies=False)
    logger: Logger = setting("tensorboard", "tensorboard or none", identifies=False)
    log_dir: Path | None = setting(None, "folder for TensorBoard; default: logs/ under --save-path", identifies=False)
    run_name: str = setting("draft", "name of the run in TensorBoard", identifies=False)
    save_dtype: Dtype = setting("auto", "dtype of the saved weights: float32, bfloat16 or auto (that of the verifier)")
    dry_run: bool = setting(False, "check everything and print the resolved settings; train nothing", identifies=False)
    restart: bool = setting(
        False, "start again: forget the training state of an earlier run in --save-path", identifies=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.time_limit is None or seconds_of(self.time_limit) is not None
        check(fits, "time_limit", self.time_limit, "must be a span of time such as 3h30m, 90m or 5400 (seconds)")


@dataclass(frozen=True, kw_only=True)
class StatesSettings(TrainSettings):
    """Make hidden states on disk, once, for runs of `blockdraft train` with the same settings."""

    hidden_states_path: Path = required("folder to fill; what it holds already is kept")
    save_path: Path = setting(Path(), "not used here; a recipe of `blockdraft train` may name it")
