"""`blockdraft states`: make the hidden states that `blockdraft train` with the same settings reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from blockdraft.pipeline.train import plan_of
from blockdraft.settings import StatesSettings
from blockdraft.training.hidden_state_files import HiddenStateFiles


def states(settings: StatesSettings) -> dict[str, Any]:
    """Fill a folder with the states of all documents; a killed run goes on where it was."""
    plan = plan_of(dataclasses.replace(settings, on_missing="generate", on_generate="cache"))
    files, documents = plan.states.provider, plan.documents
    assert isinstance(files, HiddenStateFiles)
    missing = len(files.missing(documents))
    result = {
        "hidden_states": str(files.folder),
        "documents": len(documents),
        "made": missing,
        "found": len(documents) - missing,
        "tokens": sum(len(document.input_ids) for document in documents),
        "bytes": files.size(documents),
    }
    if not settings.dry_run:
        files.prepare(documents)
    return result
