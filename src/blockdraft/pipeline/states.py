"""`blockdraft states`: make the hidden states that `blockdraft train` with the same settings reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from blockdraft.pipeline.train import trainer_of
from blockdraft.settings import StatesSettings
from blockdraft.training.state_files import StateFiles


def states(settings: StatesSettings) -> dict[str, Any]:
    """Fill a folder with the states of all documents; a killed run goes on where it was."""
    trainer = trainer_of(dataclasses.replace(settings, on_missing="generate", on_generate="cache"))
    source, documents = trainer.states.source, trainer.documents
    assert isinstance(source, StateFiles)
    missing = len(source.missing(documents))
    result = {
        "hidden_states": str(source.folder),
        "documents": len(documents),
        "made": missing,
        "found": len(documents) - missing,
        "tokens": sum(len(document.input_ids) for document in documents),
        "bytes": source.size(documents),
    }
    if not settings.dry_run:
        source.prepare(documents)
    return result
