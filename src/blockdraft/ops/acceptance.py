"""The acceptance rule of speculative decoding, greedy and sampled, and the walk over rounds.

Greedy: the longest prefix of the draft that equals the verifier's own argmax is accepted. Sampled: Leviathan et al.,
"Fast inference from transformers via speculative decoding" (2023), Algorithm 1: token d is accepted with probability
min(1, verifier(d) / draft(d)); the first rejected one is drawn again from the clipped difference, so that the text
is distributed exactly as the verifier's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def accepted_prefix(proposed_NW: Tensor, verifier_NW: Tensor) -> Tensor:
    """Length of the leading run in which drafted and verifier ids agree, [N]."""
    return (proposed_NW == verifier_NW).long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome of one sampled verification: `accepted` [R] draft tokens, then `bonus` [R] from the verifier."""

    accepted: Tensor
    bonus: Tensor


def accept_sampled(
    proposed_RW: Tensor,
    draft_probs_RWV: Tensor | None,
    verifier_probs_RXV: Tensor,
    generator: torch.Generator | None,
    lengths_R: Tensor | None = None,
) -> Sampled:
    """Accept or reject proposed tokens so that what is emitted follows the verifier's distribution.

    Args:
        proposed_RW: K proposed ids a row.
        draft_probs_RWV: what each was drawn from; None where they were chosen without chance, as the most likely are: a
            distribution with all its mass on one token, so that a token is accepted with the verifier's probability.
        verifier_probs_RXV: the verifier's distributions at the K + 1 positions.
        lengths_R: how many of its proposed ids each row proposes; None proposes all. The length may depend on the
            ids before it, not on those behind: what is not proposed is as if it had never been drawn.
    """
    rows, k = proposed_RW.shape
    if draft_probs_RWV is None:
        draft_probs_RWV = torch.zeros_like(verifier_probs_RXV[:, :k]).scatter(2, proposed_RW[..., None], 1.0)
    draft_p = draft_probs_RWV.gather(2, proposed_RW[..., None])[..., 0]
    verifier_p = verifier_probs_RXV[:, :k].gather(2, proposed_RW[..., None])[..., 0]
    draws = torch.rand(rows, k, generator=generator, device=proposed_RW.device, dtype=draft_p.dtype)
    taken = draws * draft_p < verifier_p
    if lengths_R is not None:
        unproposed = torch.arange(k, device=proposed_RW.device) >= lengths_R[:, None]
        taken = taken & ~unproposed
        draft_probs_RWV = draft_probs_RWV.masked_fill(unproposed[..., None], 0)
    accepted = taken.long().cumprod(dim=1).sum(dim=1)
    row = torch.arange(rows, device=accepted.device)
    at_stop = verifier_probs_RXV[row, accepted]
    # Behind a fully accepted proposal there is no draft distribution: the bonus comes from the verifier alone.
    padded = torch.cat([draft_probs_RWV, torch.zeros_like(draft_probs_RWV[:, :1])], dim=1)
    residual = (at_stop - padded[row, accepted]).clamp_min(0)
    # Where rounding leaves no residual, draft and verifier agree and either distribution is right.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, at_stop)
    return Sampled(accepted, torch.multinomial(residual, 1, generator=generator)[:, 0])


@dataclass(frozen=True, slots=True)
class Round:
    """One round of decoding. Two rounds are equal when they proposed the same tokens and delivered as many of them.

    Attributes:
        anchor: index of the anchor in the sequence.
        tokens: the proposed tokens.
        delivered: how many of them became part of the reply. Tokens beyond the end of a reply do not count, though the
            verifier may have accepted them: nobody receives them.
        accepted: how many of them the verifier accepted, those beyond the end included, as engines count; None
            where only the reply is known.
    """

    anchor: int
    tokens: tuple[int, ...]
    delivered: int
    accepted: int | None = field(default=None, compare=False)

    @property
    def proposed(self) -> int:
        """Number of proposed tokens."""
        return len(self.tokens)


def walk_rounds(
    accepted_at: Sequence[int], proposed_at: Sequence[Sequence[int]], first_anchor: int, last: int
) -> list[Round]:
    """The rounds that decoding takes, given what would be proposed and how much of it accepted at each anchor.

    Args:
        accepted_at: accepted tokens by anchor; entry i belongs to anchor `first_anchor + i`.
        proposed_at: proposed tokens by anchor.
        first_anchor: index of the first token of the reply, which the prefill gives without a draft.
        last: index of the last token of the reply.
    """
    rounds = []
    anchor = first_anchor
    while anchor < last:
        accepted = min(accepted_at[anchor - first_anchor], last - anchor)
        rounds.append(Round(anchor, tuple(proposed_at[anchor - first_anchor]), accepted))
        anchor += accepted + 1
    return rounds


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Raw counts over rounds; every figure of acceptance is derived from these."""

    rounds: int
    proposed: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    """How many rounds accepted their first, second, ... token."""

    @classmethod
    def of(cls, rounds: Sequence[Round], k: int) -> AcceptanceCounts:
        """Count rounds that each proposed up to `k` tokens."""
        return cls(
            rounds=len(rounds),
            proposed=sum(r.proposed for r in rounds),
            accepted=sum(r.delivered for r in rounds),
            accepted_per_position=tuple(sum(r.delivered > i for r in rounds) for i in range(k)),
        )

    @property
    def acceptance_length(self) -> float:
        """1 + accepted tokens per round: the bonus token counts."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the proposed tokens."""
        return self.accepted / self.proposed if self.proposed else 0.0
