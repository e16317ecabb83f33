"""Is a proposed token of a half-precision draft another one because of rounding?

As for text (`identity`): both tokens must lie near the best one in float32, within what rounding was measured to do to
gaps of this draft's logits. One example has few slots, and an engine rounds in its own way: whoever compares takes the
largest bound of all examples of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.decoding.identity import TIE_CEILING
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.anchors import Blocks
from blockdraft.records import Example
from blockdraft.verifiers.base import Verifier

RIVALS = 4  # tokens of a slot whose gaps to the best are measured


class DraftAndVerifier(Protocol):
    """A draft with the verifier it was trained for."""

    @property
    def verifier(self) -> Verifier: ...

    @property
    def draft(self) -> BlockDraft: ...


class SlotGaps:
    """Float32 gaps of the slots of one example's blocks.

    Args:
        exact, rounded: the same draft and verifier in float32 and in the dtype that is served.
        proposals: what the rounded draft proposes after each anchor, by position.
    """

    def __init__(
        self,
        exact: DraftAndVerifier,
        rounded: DraftAndVerifier,
        example: Example,
        proposals: Mapping[int, Sequence[int]],
    ) -> None:
        self.anchors = sorted(proposals)
        self._draft = exact.draft
        blocks = torch.tensor([list(proposals[anchor]) for anchor in self.anchors])
        self.logits_NKV, found = (slot_logits(pair, example, self.anchors, blocks) for pair in (exact, rounded))
        if not self.anchors:
            self.bound = 0.0
            return
        best = self.logits_NKV.topk(min(RIVALS, self.logits_NKV.shape[-1]), dim=-1).indices
        gaps = [each.gather(2, best) for each in (self.logits_NKV, found)]
        noise = (gaps[0][..., :1] - gaps[0]) - (gaps[1][..., :1] - gaps[1])
        self.bound = min(float(noise.abs().max()), TIE_CEILING)

    def gap(self, anchor: int, slot: int, wanted: int, found: int) -> float | None:
        """By how much the lower of two verifier tokens falls short of the best; None where the draft cannot say one."""
        ids = torch.tensor([wanted, found], device=self.logits_NKV.device)
        if self._draft.vocabulary is not None:
            ids = self._draft.vocabulary.to_draft(ids)
        if bool((ids < 0).any()):
            return None
        logits = self.logits_NKV[self.anchors.index(anchor), slot]
        return float(logits.max() - logits[ids].min())


@torch.inference_mode()
def slot_logits(pair: DraftAndVerifier, example: Example, anchors: Sequence[int], blocks_NK: Tensor) -> Tensor:
    """float32 logits [N, K, Vd] of every slot, given the tokens proposed before it."""
    draft, verifier = pair.draft, pair.verifier
    tokens = torch.tensor(example.input_ids, device=verifier.device)
    if not anchors:
        return torch.empty(0, 0, 1)
    where = torch.tensor(list(anchors), device=tokens.device)
    blocks = Blocks(where, torch.zeros_like(where), torch.full_like(where, len(tokens)))
    states = verifier.states([tokens], draft.config.target_layer_ids, [example.source_ids])[0]
    taps = states.taps.to(draft.norm.weight.dtype)
    k = blocks_NK.shape[1]
    positions = torch.arange(len(tokens), device=tokens.device)
    hidden = draft(taps, tokens, positions, blocks, draft.slots_for(k))
    hidden = draft.predicted(hidden)
    logits = draft.logits(hidden)
    if draft.sequential is not None:
        previous = torch.cat((tokens[where][:, None], blocks_NK[:, :-1].to(tokens.device)), dim=1)
        logits = logits + draft.sequential.bias(draft.sequential.teacher_forced(hidden, previous)).float()
    return logits
