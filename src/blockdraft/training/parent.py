"""The checkpoint that a run starts from (`--from-pretrained`): its shape, its vocabulary and its weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.checkpoints.speculators import FILE_NAMES
from blockdraft.checkpoints.store import digest, read_checkpoint
from blockdraft.contract import Contract
from blockdraft.models.block_draft import BlockDraft
from blockdraft.progress import say
from blockdraft.settings import DraftSettings, TrainSettings
from blockdraft.verifiers.base import TrainingVerifier


@dataclass(frozen=True, slots=True)
class Parent:
    """A checkpoint to start from.

    Attributes:
        tensors: by their names in the file.
    """

    folder: Path
    contract: Contract
    tensors: dict[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """Where it was, and what it was."""
        return {"folder": str(self.folder.resolve()), "digest": digest({}, self.tensors)}

    @property
    def vocabulary(self) -> Tensor | None:
        """Verifier ids of a reduced vocabulary; None for the full one."""
        return self.tensors["t2d"].nonzero().flatten() if self.contract.draft.reduced else None

    @torch.no_grad()
    def fill(self, draft: BlockDraft) -> None:
        """Give a draft of the parent's shape its weights, in the dtype that the draft trains in."""
        names = {name: FILE_NAMES.get(name, name) for name in draft.state_dict()}
        draft.load_state_dict({name: self.tensors[stored] for name, stored in names.items()})


def read_parent(settings: TrainSettings, verifier: TrainingVerifier) -> Parent | None:
    """The checkpoint that the settings start from; None without one. Says which flags it overrules.

    Raises:
        InputError: it cannot be read, or is of another verifier.
    """
    if settings.from_pretrained is None:
        return None
    found = read_checkpoint(settings.from_pretrained)
    found.contract.require_verifier(verifier.identity, verifier.logit_softcap)
    config = found.contract.draft
    same = {field.name for field in dataclasses.fields(DraftSettings)} & {f.name for f in dataclasses.fields(config)}
    asked = {name: getattr(settings, name) for name in sorted(same)}
    other = [
        f"{name.replace('_', '-')} {getattr(config, name)}"
        for name, value in asked.items()
        if value not in (None, (), getattr(config, name)) and name != "standardize_taps"
    ]
    kept = f"; its own count: {', '.join(other)}" if other else ""
    say(f"starting from {settings.from_pretrained}, a {config.method} draft{kept}")
    return Parent(settings.from_pretrained, found.contract, dict(found.tensors))
