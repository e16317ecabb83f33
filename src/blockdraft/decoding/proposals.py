"""From the hidden states of a block's slots to proposed tokens, the same way for one-pass acceptance and decoding.

Without a sequential head all slots choose at once; with one, each slot's logits are corrected by the token chosen
before it. A confidence head may end a proposal early: the rest of a block is not worth verifying once the chance
that the proposal survives so far falls under a threshold. That changes how much is verified and never what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.heads import SequentialHead

LOGIT_BYTES = 64 * 2**20  # float32 logits that a pass over many anchors holds at once

Choose = Callable[[Tensor], Tensor]  # logits [..., Vd] -> draft ids [...]


class Proposing(Protocol):
    """What choosing tokens needs of a draft: BlockDraft has it, and so has the model that vLLM runs."""

    @property
    def sequential(self) -> SequentialHead | None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def to_verifier_ids(self, draft_ids: Tensor) -> Tensor: ...

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """Proposed tokens of R blocks.

    Attributes:
        tokens: verifier ids, [R, W]; W may be less than was asked for when no block goes that far.
        logits: what they were chosen from, [R, W, Vd].
        lengths: how many of them each block proposes, [R].
    """

    tokens: Tensor
    logits: Tensor
    lengths: Tensor


def most_likely(logits: Tensor) -> Tensor:
    """Greedy choice."""
    return logits.argmax(dim=-1)


def propose(
    draft: Proposing, hidden_RKD: Tensor, anchors_R: Tensor, choose: Choose = most_likely, threshold: float = 0.0
) -> Proposal:
    """Choose tokens for predicted slots.

    Args:
        hidden_RKD: hidden states of the slots that propose (`BlockDraft.predicted`).
        anchors_R: the verifier ids of the anchors.
        threshold: propose up to the first slot at which the product of confidences falls under it; 0 proposes all.
            Needs a confidence head.
    """
    if draft.sequential is None:
        logits = draft.logits(hidden_RKD)
        tokens = draft.to_verifier_ids(choose(logits))
        return Proposal(tokens, logits, _confident_lengths(draft, hidden_RKD, anchors_R, tokens, threshold))
    base = draft.logits(hidden_RKD)
    previous, state = anchors_R, None
    columns: list[Tensor] = []
    corrected: list[Tensor] = []
    survival = torch.ones(len(anchors_R), device=anchors_R.device)
    lengths = torch.zeros_like(anchors_R)
    for slot in range(hidden_RKD.shape[1]):
        hidden = hidden_RKD[:, slot]
        if threshold:
            survival = survival * _confidence(draft, hidden, previous)
            if not bool((survival >= threshold).any()):
                break
            lengths = lengths + (survival >= threshold)
        feature, state = draft.sequential.step(hidden, previous, state)
        logits = base[:, slot] + draft.sequential.bias(feature).float()
        previous = draft.to_verifier_ids(choose(logits))
        columns.append(previous)
        corrected.append(logits)
    if not threshold:
        lengths = torch.full_like(anchors_R, len(columns))
    if not columns:
        return Proposal(anchors_R.new_empty(len(anchors_R), 0), base[:, :0], lengths)
    return Proposal(torch.stack(columns, dim=1), torch.stack(corrected, dim=1), lengths)


def propose_all(
    draft: BlockDraft, hidden_NKD: Tensor, anchors_N: Tensor, threshold: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Greedy proposals [N, K] of many blocks and their lengths [N], in groups whose logits stay small.

    What lies behind a proposal's length is -1, which is no token.
    """
    assert draft.head_VE is not None
    num_blocks, num_slots = hidden_NKD.shape[:2]
    size = max(1, LOGIT_BYTES // (4 * len(draft.head_VE) * num_slots))
    tokens = anchors_N.new_full((num_blocks, num_slots), -1)
    lengths = torch.zeros_like(anchors_N)
    for first in range(0, num_blocks, size):
        part = slice(first, first + size)
        proposal = propose(draft, hidden_NKD[part], anchors_N[part], threshold=threshold)
        tokens[part, : proposal.tokens.shape[1]] = proposal.tokens
        lengths[part] = proposal.lengths
    unproposed = torch.arange(num_slots, device=tokens.device) >= lengths[:, None]
    return tokens.masked_fill(unproposed, -1), lengths


def _confidence(draft: Proposing, hidden: Tensor, previous: Tensor) -> Tensor:
    logits = draft.confidence_logits(hidden, previous)
    assert logits is not None, "a threshold needs a draft with a confidence head"
    return logits.sigmoid()


def _confident_lengths(
    draft: Proposing, hidden_RKD: Tensor, anchors_R: Tensor, tokens_RK: Tensor, threshold: float
) -> Tensor:
    if not threshold:
        return torch.full_like(anchors_R, tokens_RK.shape[1])
    previous = torch.cat((anchors_R[:, None], tokens_RK[:, :-1]), dim=1)
    survival = _confidence(draft, hidden_RKD, previous).cumprod(dim=1)
    return (survival >= threshold).sum(dim=1)
