"""What slots are trained towards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

HEAD_ROWS = 16384  # rows of a whole head that are worked on at once


@dataclass(frozen=True, slots=True)
class Distributions:
    """The verifier's distributions p at R slots, over the tokens that the draft can propose: [R, Vd].

    Attributes:
        negative_entropy: sum p log p, [R].
        share: what part of the verifier's whole distribution these tokens have, [R]; None where it is all of it, or
            nobody asked.
    """

    probs: Tensor
    negative_entropy: Tensor
    share: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Distributions:
        share = None if self.share is None else self.share[rows]
        return Distributions(self.probs[rows], self.negative_entropy[rows], share)


@dataclass(frozen=True, slots=True)
class Teacher:
    """Where the verifier's distributions come from; they are made when they are needed.

    Attributes:
        final_TE: verifier states after its final norm.
        positions_NK: the state that each slot's distribution comes from.
        head_VE: rows of the verifier's head for the tokens that the draft can propose.
        softcap: the verifier's logits are softcap * tanh(logits / softcap); None leaves them.
        whole_head_VE: all rows of the verifier's head, where the draft proposes from fewer and the chance that its
            proposals are accepted is wanted; else None.
    """

    final_TE: Tensor
    positions_NK: Tensor
    head_VE: Tensor
    softcap: float | None
    whole_head_VE: Tensor | None = None

    def raw_logits(self, positions: Tensor) -> Tensor:
        """Products with the head, [..., Vd] in its dtype, at positions [...]; no soft cap yet."""
        return linear(self.final_TE[positions].to(self.head_VE.dtype), self.head_VE)

    def logits(self, raw: Tensor) -> Tensor:
        """The verifier's logits, float32 (float64 for float64), of raw ones; a copy."""
        exact = raw.to(torch.float64 if raw.dtype == torch.float64 else torch.float32, copy=True)
        return exact if self.softcap is None else exact.div_(self.softcap).tanh_().mul_(self.softcap)

    def log_sums(self, positions: Tensor) -> Tensor | None:
        """Log of the sum of exp over the logits of the verifier's whole vocabulary, at positions [R]."""
        if self.whole_head_VE is None:
            return None
        final, head = self.final_TE[positions].to(self.whole_head_VE.dtype), self.whole_head_VE
        parts = (self.logits(linear(final, rows)).logsumexp(dim=-1) for rows in head.split(HEAD_ROWS))
        return torch.stack(list(parts)).logsumexp(dim=0)

    def distributions(self, raw_RV: Tensor, log_sums_R: Tensor | None = None) -> Distributions:
        """Softmax of raw logits.

        Args:
            log_sums_R: of the whole vocabulary, where the share of these tokens in it is wanted.
        """
        logits = self.logits(raw_RV)
        log_sum = logits.logsumexp(dim=-1)
        probs = logits.softmax(dim=-1)
        share = None if log_sums_R is None else (log_sum - log_sums_R).exp()
        return Distributions(probs, torch.linalg.vecdot(probs, logits) - log_sum, share)


@dataclass(frozen=True, slots=True)
class SlotTargets:
    """Targets of the predicted slots of some blocks.

    Attributes:
        ids_NK: the verifier's own token as a draft id; anything where `in_vocabulary_NK` is False.
        mask_NK: supervised slots. They count in metrics and in the normalization.
        in_vocabulary_NK: supervised slots whose target the draft can say. A reduced vocabulary lacks some: such a slot
            has no loss, since nothing could make it right, and counts as wrong.
        teacher: the verifier's distributions, for objectives that need more than its token.
        supervised: supervised slots of the whole step; None where it has no others than these.
    """

    ids_NK: Tensor
    mask_NK: Tensor
    in_vocabulary_NK: Tensor
    teacher: Teacher | None = None
    supervised: int | None = None

    def __getitem__(self, blocks: slice) -> SlotTargets:
        """The targets of some of the blocks, without a teacher."""
        ids, mask, in_vocabulary = self.ids_NK[blocks], self.mask_NK[blocks], self.in_vocabulary_NK[blocks]
        return SlotTargets(ids, mask, in_vocabulary, supervised=self.supervised)

    def scale(self) -> Tensor:
        """1 / supervised slots of the step: the one normalization of every objective."""
        own = self.mask_NK.sum()
        return 1 / (own if self.supervised is None else torch.full_like(own, self.supervised)).clamp_min(1)
