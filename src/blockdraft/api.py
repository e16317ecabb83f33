"""The Python interface: `import blockdraft` offers these functions and the types that they take and return.

Each function takes the settings of the command of the same name, either as keywords or as an object of its settings
class. Defaults, ranges and errors are those of the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.errors import InputError
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline import evaluate as evaluation
from blockdraft.pipeline import train as training
from blockdraft.pipeline.loading import Pair, load_pair, verifier_of
from blockdraft.settings import CheckpointSettings, EvaluateSettings, TrainSettings, VerifierSettings, build
from blockdraft.training.history import Summary, read_summary
from blockdraft.verifiers.base import Verifier

S = TypeVar("S")
_OF_VERIFIER = {"verifier_name_or_path", "revision", "trust_remote_code", "dtype", "device"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        acceptance: exact counts by K.
        failures: what was not proved, a line each; empty where everything holds.
        report: all of it as the command's `--json` prints it, decoding speed included.
    """

    acceptance: dict[int, AcceptanceCounts]
    failures: tuple[str, ...]
    report: dict[str, Any]


def load_verifier(name_or_path: str = VerifierSettings.verifier_name_or_path, **settings: Any) -> Verifier:
    """Load a verifier: a folder, a hub id or a .gguf file.

    Args:
        settings: `VerifierSettings`: dtype, device, threads, trust_remote_code, revision.

    Raises:
        InputError: nothing there, or a model that is not supported.
    """
    return verifier_of(_settings(VerifierSettings, None, {"verifier_name_or_path": name_or_path, **settings}))


def load_draft(checkpoint: str | Path, verifier: Verifier | None = None, **settings: Any) -> Pair:
    """Load a draft together with its verifier.

    Args:
        checkpoint: folder of the draft.
        verifier: one that is loaded already; else the one that the checkpoint names is loaded.
        settings: `CheckpointSettings`: dtype, device, threads, verifier_name_or_path and others.

    Raises:
        InputError: a damaged checkpoint, or another verifier than the one the draft was trained for.
    """
    for name in sorted(_OF_VERIFIER & settings.keys()) if verifier is not None else ():
        raise InputError(name, settings[name], "is the given verifier's already; leave it out")
    return load_pair(_settings(CheckpointSettings, None, {"checkpoint": checkpoint, **settings}), verifier)


def train(settings: TrainSettings | None = None, /, *, verifier: Verifier | None = None, **values: Any) -> Summary:
    """Train a draft, as `blockdraft train` does; a run that was stopped resumes.

    Args:
        settings: instead of keywords.
        verifier: one that is loaded already; else the one that the settings name is loaded.
        values: `TrainSettings`; data_path and save_path are required.

    Raises:
        InputError: wrong settings or data, found before anything is trained.
        StoppedError: stopped by a signal or `time_limit`; the state is saved, and the same call goes on.
    """
    asked = _settings(TrainSettings, settings, values)
    if asked.dry_run:
        raise InputError("dry_run", True, "belongs to the command line; TrainSettings(...) alone checks settings")
    training.train(asked, verifier)
    return read_summary(asked.save_path, "--save-path")


def evaluate(settings: EvaluateSettings | None = None, /, **values: Any) -> Evaluation:
    """Compute the exact acceptance of a draft, as `blockdraft evaluate` does.

    Args:
        settings: instead of keywords.
        values: `EvaluateSettings`; checkpoint is required.

    Raises:
        InputError: wrong settings, prompts or checkpoint.
    """
    report = evaluation.evaluate(_settings(EvaluateSettings, settings, values))
    names = {field.name for field in dataclasses.fields(AcceptanceCounts)}
    acceptance = {
        int(k): AcceptanceCounts(**{name: _frozen(counts[name]) for name in names})
        for k, counts in report["acceptance"].items()
    }
    return Evaluation(acceptance, tuple(report["failures"]), report)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _settings(cls: type[S], given: S | None, values: dict[str, Any]) -> S:
    """Settings as an object or as keywords, not both."""
    if given is None:
        return build(cls, values)
    if values:
        name = next(iter(values))
        raise InputError(name, values[name], f"give it in {cls.__name__}(...), or give keywords alone")
    if not isinstance(given, cls):
        raise InputError("settings", type(given).__name__, f"must be {cls.__name__}, or keywords")
    return given
