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
        rounds: by K, the rounds that decoding this reply takes.
        disagreements: reply tokens that are not the verifier's argmax in this pass. 0 for its own greedy text in
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
    """Exact acceptance of each document's reply for every K of `ks`; the verifier runs once over all documents."""
    results = []
    sequences = [torch.tensor(document.input_ids, device=verifier.device) for document in documents]
    every_states = verifier.states(sequences, draft.config.tap_ids)
    for document, tokens, states in zip(documents, sequences, every_states, strict=True):
        first = document.reply_start
        argmax = verifier.greedy(states.final[first - 1 : -1])
        rounds = rounds_of_document(draft, document, states.taps, ks, confidence_threshold)
        results.append(OnePass(rounds, int((argmax != tokens[first:]).sum())))
    return results


@torch.inference_mode()
def document_proposals(verifier: Verifier, draft: BlockDraft, document: Document, k: int) -> dict[int, list[int]]:
    """What the draft proposes after every token of a document's reply but the last, by position, K = k."""
    tokens = torch.tensor(document.input_ids, device=verifier.device)
    taps = verifier.states([tokens], draft.config.tap_ids)[0].taps
    _, drafted, _ = _every_block(draft, document, taps, k, 0.0)
    return {document.reply_start + i: block for i, block in enumerate(drafted.tolist())}


def rounds_of_document(
    draft: BlockDraft,
    document: Document,
    taps_TLE: Tensor,
    ks: Sequence[int],
    confidence_threshold: float = 0.0,
) -> dict[int, list[Round]]:
    """The rounds that decoding a document's reply takes for every K, given the verifier's taps at its positions."""
    first, last = document.reply_start, len(document.input_ids) - 1
    rounds = {}
    for k in ks:
        accepted, drafted, lengths = _every_block(draft, document, taps_TLE, k, confidence_threshold)
        blocks = [block[:length] for block, length in zip(drafted.tolist(), lengths.tolist(), strict=True)]
        rounds[k] = walk_rounds(accepted.tolist(), blocks, first, last)
    return rounds


def _every_block(
    draft: BlockDraft, document: Document, taps_TLE: Tensor, k: int, confidence_threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One block after every token of the reply but the last: accepted [N], proposed ids [N, K], their lengths [N]."""
    row = pack_row([document])
    tokens, positions = row.tokens.to(taps_TLE.device), row.positions.to(taps_TLE.device)
    last = len(document.input_ids) - 1
    blocks = choose_anchors(row.loss_mask.to(tokens.device), row.lengths.to(tokens.device), max_anchors=0)
    if not len(blocks):
        none = tokens.new_empty(0)
        return none, none.view(0, k), none
    taps = taps_TLE if torch.is_autocast_enabled(taps_TLE.device.type) else taps_TLE.to(draft.norm.weight.dtype)
    hidden = draft.predicted(draft(taps, tokens, positions, blocks, draft.slots_for(k)))
    drafted, lengths = propose_all(draft, hidden, tokens[blocks.anchors], confidence_threshold)
    slots = blocks.anchors[:, None] + torch.arange(1, k + 1, device=tokens.device)
    # Behind the reply there is nothing to agree with: -2 is no token, and not what stands for no proposal.
    wanted = torch.where(slots <= last, tokens[slots.clamp(max=last)], -2)
    return accepted_prefix(drafted, wanted), drafted, lengths
