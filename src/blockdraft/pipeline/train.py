"""`blockdraft train`."""

from __future__ import annotations

import dataclasses
from typing import Any

from blockdraft.data.table import RECORD, Documents, read_documents
from blockdraft.errors import InputError
from blockdraft.folders import read_json
from blockdraft.pipeline.loading import verifier_of
from blockdraft.pipeline.prepare import chat_mode
from blockdraft.progress import say
from blockdraft.serving.support import served_by_engine
from blockdraft.settings import TrainSettings, resolved
from blockdraft.training.states import TrainingStates
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.base import Verifier


def train(
    settings: TrainSettings, verifier: Verifier | None = None, states: TrainingStates | None = None
) -> dict[str, Any]:
    """Train a draft on prepared data.

    Args:
        verifier: one that is loaded already; else the one the settings name.
        states: hidden states that are made already, of the same documents.
    """
    trainer = trainer_of(settings, verifier, states)
    served = served_by_engine(trainer.contract, trainer.contract.verifier.name)
    if not served.startswith("yes"):
        say(f"warning: this draft cannot be served by vLLM ({served.removeprefix('no: ')})")
    if settings.dry_run:
        return {"dry_run": True, "steps": trainer.total_steps, "settings": resolved(settings)}
    trainer.prepare()
    return trainer.run()


def trainer_of(
    settings: TrainSettings, verifier: Verifier | None = None, states: TrainingStates | None = None
) -> Trainer:
    """A trainer on prepared data that belongs to the verifier; arguments as `train` has them."""
    documents = read_documents(settings.data_path, "--data-path")
    facts = read_json(settings.data_path / RECORD, "--data-path")["facts"]
    verifier = verifier or verifier_of(settings)
    require_text_of(settings, verifier, facts, documents)
    return Trainer(as_prepared(settings, facts), verifier, documents, states, chat_mode(facts))


def as_prepared(settings: TrainSettings, facts: dict[str, Any]) -> TrainSettings:
    """The settings with what they leave to the data."""
    return dataclasses.replace(settings, train_data_ratio=settings.train_data_ratio or facts["train_data_ratio"])


def require_text_of(settings: TrainSettings, verifier: Verifier, facts: dict[str, Any], documents: Documents) -> None:
    """Refuse another verifier's replies and tokens; say so where nobody knows who wrote them."""
    if facts.get("tokenizer") != verifier.identity.tokenizer_hash:
        raise InputError(
            "--data-path", settings.data_path, "was prepared with another tokenizer; prepare it for this verifier"
        )
    if "verifier" not in facts:
        say("the replies are those of the data, not the verifier's own: run blockdraft regenerate for more acceptance")
    for name, made_with in facts.get("verifier", {}).items():
        found = getattr(verifier.identity, name, None)
        if made_with != found:
            raise InputError(
                "--data-path",
                settings.data_path,
                f"another verifier wrote its replies ({name} {made_with}, this one has {found}); regenerate them",
            )
    require_sources(verifier, documents)
    longest = max(documents, key=lambda document: len(document.input_ids))
    if len(longest.input_ids) > verifier.context_length:
        raise InputError(
            f"--data-path example {longest.id}",
            f"{len(longest.input_ids)} tokens",
            f"the verifier's context holds {verifier.context_length}; prepare the data with --max-length "
            f"{verifier.context_length}",
        )
    largest = max(max(document.input_ids) for document in documents)
    if largest >= verifier.identity.vocab_size:
        raise InputError("--data-path", settings.data_path, f"token {largest} is outside the verifier's vocabulary")


def require_sources(verifier: Verifier, documents: Documents) -> None:
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
