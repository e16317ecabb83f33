"""A reduced draft vocabulary: which verifier tokens a draft can propose.

Stored as in the Speculators format: `d2t` holds offsets (verifier id = d + d2t[d]) and `t2d` marks the kept tokens.
Tokens that go *into* a draft are always verifier ids; only its output is reduced.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from blockdraft.draft_config import DraftConfig


class DraftVocabulary(nn.Module):
    """The map between draft and verifier ids. Empty until `keep` or loading fills it."""

    d2t: Tensor  # int64 [Vd], offsets
    t2d: Tensor  # bool [V]

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def keep(self, ids: Tensor) -> None:
        """Keep these verifier ids, ascending, int64 [Vd]."""
        self.t2d.zero_()
        self.t2d[ids] = True
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))

    @property
    def ids(self) -> Tensor:
        """Verifier ids of the kept tokens, ascending, [Vd]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def consistent(self) -> bool:
        """Whether both tensors state the same map, in ascending order."""
        ids = self.ids
        within = bool((ids >= 0).all()) and bool((ids < len(self.t2d)).all())
        return within and torch.equal(self.t2d.nonzero()[:, 0], ids)

    def to_verifier(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, verifier_ids: Tensor) -> Tensor:
        """Draft ids of verifier ids; -1 where the draft cannot say the token."""
        table = torch.full_like(self.t2d, -1, dtype=torch.int64)
        table[self.ids] = torch.arange(len(self.d2t), device=table.device)
        return table[verifier_ids]

    def expand(self, probs: Tensor) -> Tensor:
        """Probabilities [..., V] over the verifier's vocabulary; tokens that are not kept get zero."""
        full = probs.new_zeros(*probs.shape[:-1], len(self.t2d))
        full[..., self.ids] = probs
        return full


def map_digest(ids: Tensor, vocab_size: int) -> str:
    """What the contract records of a map: SHA-256 over the kept ids and the vocabulary's size, 16 digits."""
    digest = hashlib.sha256(f"{vocab_size}:".encode())
    digest.update(ids.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]
