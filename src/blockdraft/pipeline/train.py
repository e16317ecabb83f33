"""`blockdraft train`."""

from __future__ import annotations

from typing import Any

from blockdraft.decoding.regenerate import DOCUMENTS, RECORD
from blockdraft.errors import InputError
from blockdraft.folders import read_json
from blockdraft.pipeline.loading import verifier_of
from blockdraft.records import Document, read_documents
from blockdraft.settings import TrainSettings, resolved
from blockdraft.training.states import InProcessStates
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.base import Verifier


def train(
    settings: TrainSettings, verifier: Verifier | None = None, states: InProcessStates | None = None
) -> dict[str, Any]:
    """Train a draft on regenerated documents.

    Args:
        verifier: one that is loaded already; else the one the settings name.
        states: hidden states that are made already, of the same documents.
    """
    documents = read_documents(settings.data_path / DOCUMENTS, "--data-path")
    verifier = verifier or verifier_of(settings)
    require_own_replies(settings, verifier, documents)
    trainer = Trainer(settings, verifier, documents, states)
    if settings.dry_run:
        return {"dry_run": True, "steps": trainer.total_steps, "settings": resolved(settings)}
    trainer.prepare()
    return trainer.run()


def require_own_replies(settings: TrainSettings, verifier: Verifier, documents: list[Document]) -> None:
    """Refuse replies that another verifier wrote, and tokens that this one does not have."""
    record = read_json(settings.data_path / RECORD, "--data-path")
    for name, made_with in record.get("facts", {}).get("verifier", {}).items():
        found = getattr(verifier.identity, name, None)
        if made_with != found:
            raise InputError(
                "--data-path",
                settings.data_path,
                f"another verifier wrote its replies ({name} {made_with}, this one has {found}); regenerate them",
            )
    require_sources(verifier, documents)
    largest = max(max(document.input_ids) for document in documents)
    if largest >= verifier.identity.vocab_size:
        raise InputError("--data-path", settings.data_path, f"token {largest} is outside the verifier's vocabulary")


def require_sources(verifier: Verifier, documents: list[Document]) -> None:
    """Refuse texts without sources where there is an encoder, sources where there is none, and unreadable ones."""
    for document in documents:
        where = f"--data-path document {document.id}"
        if (document.source_ids is not None) != verifier.has_encoder:
            kind = "an encoder, and this text has no source for it" if verifier.has_encoder else "no encoder"
            raise InputError(
                where, verifier.identity.architecture, f"the verifier has {kind}; prepare data for this one"
            )
        if document.source_ids is not None:
            verifier.sides(document.source_ids, where)
