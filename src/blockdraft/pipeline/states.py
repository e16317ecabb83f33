"""`blockdraft states`: make the hidden states that `blockdraft train` with the same settings reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from blockdraft.pipeline.train import plan_of
from blockdraft.settings import StatesSettings
from blockdraft.training.hidden_state_files import HiddenStateFiles


def states(settings: StatesSettings) -> dict[str, Any]:
    """Fill a folder with the states of all examples; a killed run goes on where it was."""
    plan = plan_of(dataclasses.replace(settings, on_missing="generate", on_generate="cache"))
    files, examples = plan.states.provider, plan.examples
    assert isinstance(files, HiddenStateFiles)
    missing = len(files.missing(examples))
    result = {
        "hidden_states": str(files.folder),
        "documents": len(examples),
        "made": missing,
        "found": len(examples) - missing,
        "tokens": sum(len(example.input_ids) for example in examples),
        "bytes": files.size(examples),
    }
    if not settings.dry_run:
        files.prepare(examples)
    plan.states.close()
    return result
