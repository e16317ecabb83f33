"""One-pass exact acceptance: the rounds that greedy decoding would take, without decoding.

Greedy speculative decoding emits the verifier's own text whatever the draft says. So one verifier pass over that
text, and one draft pass with every reply position as an anchor, give the proposed tokens of every round that could
happen; walking from anchor to anchor gives those that do. A block attends within itself, so serving with K tokens
needs a pass with its own number of slots: cutting a longer block gives other tokens.

The draft runs through the same code as in training, so that equality with the engine's counts proves trainer and
engine the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.data.packing import pack_row
from blockdraft.decoding.proposals import propose_all
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.acceptance import Round, accepted_prefix, walk_rounds
from blockdraft.ops.anchors import choose_anchors
from blockdraft.records import Example
from blockdraft.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class OnePass:
    """Result for one example.

    Attributes:
        rounds: by K, the rounds that decoding the replies takes, one reply after the other.
        disagreements: supervised tokens that are not the verifier's argmax in this pass. 0 for its own greedy text in
            float32; in bfloat16 a few near-ties; many in foreign text, for which acceptance means nothing.
    """

    rounds: dict[int, list[Round]]
    disagreements: int


@torch.inference_mode()
def one_pass_acceptance(
    verifier: Verifier,
    draft: BlockDraft,
    examples: Sequence[Example],
    ks: Sequence[int],
    confidence_threshold: float = 0.0,
) -> list[OnePass]:
    """Exact acceptance of each example's replies for every K of `ks`; the verifier runs once over all examples."""
    results = []
    sequences = [torch.tensor(example.input_ids, device=verifier.device) for example in examples]
    sources = [example.source_ids for example in examples]
    every_states = verifier.states(sequences, draft.config.target_layer_ids, sources)
    for example, tokens, states in zip(examples, sequences, every_states, strict=True):
        rounds = rounds_of_example(draft, example, states.taps, ks, confidence_threshold)
        disagreements = 0
        for start, end in example.targets:
            argmax = verifier.greedy(states.final[start - 1 : end - 1])
            disagreements += int((argmax != tokens[start:end]).sum())
        results.append(OnePass(rounds, disagreements))
    return results


@torch.inference_mode()
def example_proposals(verifier: Verifier, draft: BlockDraft, example: Example, k: int) -> dict[int, list[int]]:
    """What the draft proposes after every token of an example's replies but their last, by position, K = k."""
    tokens = torch.tensor(example.input_ids, device=verifier.device)
    taps = verifier.states([tokens], draft.config.target_layer_ids, [example.source_ids])[0].taps
    blocks = _every_block(draft, example, taps, k, 0.0)
    return dict(zip(blocks.anchors, blocks.proposed, strict=True))


def rounds_of_example(
    draft: BlockDraft,
    example: Example,
    taps_TLE: Tensor,
    ks: Sequence[int],
    confidence_threshold: float = 0.0,
) -> dict[int, list[Round]]:
    """The rounds that decoding an example's replies takes for every K, given the verifier's taps at its positions."""
    rounds: dict[int, list[Round]] = {}
    for k in ks:
        every = _every_block(draft, example, taps_TLE, k, confidence_threshold)
        place = {anchor: index for index, anchor in enumerate(every.anchors)}
        rounds[k] = []
        for start, end in example.targets:
            if end - start > 1:
                part = slice(place[start], place[end - 2] + 1)
                rounds[k] += walk_rounds(every.accepted[part], every.proposed[part], start, end - 1)
    return rounds


@dataclass(frozen=True, slots=True)
class _EveryBlock:
    """A block after every token of the replies but their last.

    Attributes:
        anchors: positions, ascending.
        proposed: what is proposed at each.
        accepted: how much of it is the verifier's own text.
    """

    anchors: list[int]
    proposed: list[list[int]]
    accepted: list[int]


def _every_block(
    draft: BlockDraft, example: Example, taps_TLE: Tensor, k: int, confidence_threshold: float
) -> _EveryBlock:
    row = pack_row([example])
    tokens, positions = row.tokens.to(taps_TLE.device), row.positions.to(taps_TLE.device)
    blocks = choose_anchors(row.loss_mask.to(tokens.device), row.lengths.to(tokens.device), max_anchors=0)
    if not len(blocks):
        return _EveryBlock([], [], [])
    taps = taps_TLE if torch.is_autocast_enabled(taps_TLE.device.type) else taps_TLE.to(draft.norm.weight.dtype)
    hidden = draft.predicted(draft(taps, tokens, positions, blocks, draft.slots_for(k)))
    drafted, lengths = propose_all(draft, hidden, tokens[blocks.anchors], confidence_threshold)
    slots = blocks.anchors[:, None] + torch.arange(1, k + 1, device=tokens.device)
    # Behind a reply there is nothing to agree with: -2 is no token, and not what stands for no proposal.
    wanted = torch.where(slots < blocks.ends[:, None], tokens[slots.clamp(max=len(tokens) - 1)], -2)
    accepted = accepted_prefix(drafted, wanted)
    proposals = [block[:length] for block, length in zip(drafted.tolist(), lengths.tolist(), strict=True)]
    return _EveryBlock(blocks.anchors.tolist(), proposals, accepted.tolist())
