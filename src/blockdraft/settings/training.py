"""Settings of `blockdraft train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockdraft.settings.base import at_least, check, one_of, required, setting
from blockdraft.settings.common import VerifierSettings
from blockdraft.settings.draft import DraftSettings, ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class TrainSettings(ObjectiveSettings, DraftSettings, VerifierSettings):
    """Train a draft on the verifier's own replies."""

    data_path: Path = required("folder that `blockdraft regenerate` or `prepare` wrote")
    save_path: Path = required("folder for the checkpoint and the training state")

    epochs: float = setting(6.0, "passes over the data; a fraction is allowed")
    total_seq_len: int = setting(2048, "tokens of a packed row; one row is one step")
    max_anchors: int = setting(128, "anchored blocks drawn from a row at each step; 0 takes every position")
    optimizer: str = setting("muon", "muon (matrices; AdamW for the rest) or adamw")
    lr: float = setting(2e-3, "peak learning rate of AdamW")
    muon_lr: float = setting(4e-2, "peak learning rate of Muon")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    scheduler_type: str = setting("cosine", "cosine, linear or constant, after warm-up")
    scheduler_warmup_ratio: float = setting(0.04, "share of the steps that warm up")
    max_grad_norm: float = setting(1.0, "clip the gradient norm; 0 does not clip")
    grad_accum: int = setting(1, "rows of a step; the last one takes what is left of them")
    noise_std: float = setting(0.0, "half-width of uniform noise on the taps while training")
    train_data_ratio: float = setting(0.0, "share of the documents to train on, the rest validates; 0: as prepared")
    states_memory_gib: float = setting(
        4.0, "hidden states kept in memory between epochs; beyond it they are read or made anew"
    )
    hidden_states_path: Path | None = setting(
        None,
        "folder of hidden states on disk, as blockdraft states makes it; default: made in process as they are needed",
    )
    on_missing: str = setting(
        "generate", "documents without states there: generate, skip, warn (skip and name them) or raise"
    )
    on_generate: str = setting("cache", "states that are generated: cache (keep them in the folder) or delete")
    compile: str = setting("auto", "torch.compile of the feed-forward layers: on, off or auto (on CUDA)")
    seed: int = setting(0, "seed of everything random")

    checkpoint_freq: float = setting(1.0, "epochs between saves of the resumable state")
    log_freq: int = setting(10, "steps between log entries")
    logger: str = setting("tensorboard", "tensorboard or none")
    log_dir: Path | None = setting(None, "folder for TensorBoard; default: logs/ under --save-path")
    run_name: str = setting("draft", "name of the run in TensorBoard")
    save_dtype: str = setting("float32", "dtype of the saved weights: float32 or bfloat16")
    dry_run: bool = setting(False, "check everything and print the resolved settings; train nothing")
    restart: bool = setting(False, "start again: forget the training state of an earlier run in --save-path")

    def __post_init__(self) -> None:
        for part in (VerifierSettings, DraftSettings, ObjectiveSettings):
            part.__post_init__(self)
        one_of(self, "optimizer", ("muon", "adamw"))
        one_of(self, "scheduler_type", ("cosine", "linear", "constant"))
        one_of(self, "logger", ("tensorboard", "none"))
        one_of(self, "save_dtype", ("float32", "bfloat16"))
        one_of(self, "compile", ("auto", "on", "off"))
        one_of(self, "on_missing", ("generate", "skip", "warn", "raise"))
        one_of(self, "on_generate", ("cache", "delete"))
        at_least(self, 1, "grad_accum", "log_freq")
        at_least(self, 2, "total_seq_len")
        at_least(self, 0, "max_anchors", "max_grad_norm", "weight_decay", "noise_std", "states_memory_gib")
        for name in ("epochs", "lr", "muon_lr", "checkpoint_freq"):
            check(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        check(0 <= self.train_data_ratio < 1, "train_data_ratio", self.train_data_ratio, "must be between 0 and 1")
        ratio = self.scheduler_warmup_ratio
        check(0 <= ratio < 1, "scheduler_warmup_ratio", ratio, "must be 0 or more and under 1")


@dataclass(frozen=True, kw_only=True)
class StatesSettings(TrainSettings):
    """Make hidden states on disk, once, for runs of `blockdraft train` with the same settings."""

    hidden_states_path: Path = required("folder to fill; what it holds already is kept")
    save_path: Path = setting(Path(), "not used here; a recipe of `blockdraft train` may name it")
