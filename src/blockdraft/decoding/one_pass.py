"""One-pass exact acceptance: the rounds that greedy decoding would take, without decoding.

Greedy speculative decoding emits the verifier's own text whatever the draft says. So one verifier pass over that
text, and one draft pass with every reply position as an anchor, give the drafted tokens of every round that could
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
from blockdraft.records import Document
from blockdraft.verifiers.base import Verifier


@dataclass(frozen=True, slots=True)
class OnePass:
    """Result for one document.

    Attributes:
        rounds: by K, the rounds that decoding the replies takes, one reply after the other.
        disagreements: learned tokens that are not the verifier's argmax in this pass. 0 for its own greedy text in
            float32; in bfloat16 a few near-ties; many in foreign text, for which acceptance means nothing.
    """

    rounds: dict[int, list[Round]]
    disagreements: int


@torch.inference_mode()
def one_pass_acceptance(
    verifier: Verifier,
    draft: BlockDraft,
    documents: Sequence[Document],
    ks: Sequence[int],
    confidence_threshold: float = 0.0,
) -> list[OnePass]:
    """Exact acceptance of each document's replies for every K of `ks`; the verifier runs once over all documents."""
    results = []
    sequences = [torch.tensor(document.input_ids, device=verifier.device) for document in documents]
    sources = [document.source_ids for document in documents]
    every_states = verifier.states(sequences, draft.config.target_layer_ids, sources)
    for document, tokens, states in zip(documents, sequences, every_states, strict=True):
        rounds = rounds_of_document(draft, document, states.taps, ks, confidence_threshold)
        disagreements = 0
        for start, end in document.targets:
            argmax = verifier.greedy(states.final[start - 1 : end - 1])
            disagreements += int((argmax != tokens[start:end]).sum())
        results.append(OnePass(rounds, disagreements))
    return results


@torch.inference_mode()
def document_proposals(verifier: Verifier, draft: BlockDraft, document: Document, k: int) -> dict[int, list[int]]:
    """What the draft proposes after every token of a document's replies but their last, by position, K = k."""
    tokens = torch.tensor(document.input_ids, device=verifier.device)
    taps = verifier.states([tokens], draft.config.target_layer_ids, [document.source_ids])[0].taps
    blocks = _every_block(draft, document, taps, k, 0.0)
    return dict(zip(blocks.anchors, blocks.drafted, strict=True))


def rounds_of_document(
    draft: BlockDraft,
    document: Document,
    taps_TLE: Tensor,
    ks: Sequence[int],
    confidence_threshold: float = 0.0,
) -> dict[int, list[Round]]:
    """The rounds that decoding a document's replies takes for every K, given the verifier's taps at its positions."""
    rounds: dict[int, list[Round]] = {}
    for k in ks:
        every = _every_block(draft, document, taps_TLE, k, confidence_threshold)
        place = {anchor: index for index, anchor in enumerate(every.anchors)}
        rounds[k] = []
        for start, end in document.targets:
            if end - start > 1:
                part = slice(place[start], place[end - 2] + 1)
                rounds[k] += walk_rounds(every.accepted[part], every.drafted[part], start, end - 1)
    return rounds


@dataclass(frozen=True, slots=True)
class _EveryBlock:
    """A block after every token of the replies but their last.

    Attributes:
        anchors: positions, ascending.
        drafted: what is proposed at each.
        accepted: how much of it is the verifier's own text.
    """

    anchors: list[int]
    drafted: list[list[int]]
    accepted: list[int]


def _every_block(
    draft: BlockDraft, document: Document, taps_TLE: Tensor, k: int, confidence_threshold: float
) -> _EveryBlock:
    row = pack_row([document])
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
