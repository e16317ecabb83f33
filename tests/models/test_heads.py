"""DSpark's heads: teacher forcing and stepping are one computation, and what each head may see."""

from __future__ import annotations

import pytest
import torch

from blockdraft.decoding.proposals import propose, propose_all
from blockdraft.models.heads import SequentialHead
from blockdraft.verifiers.causal import CausalVerifier
from conftest import HIDDEN, VOCAB, tiny_config, tiny_draft

HEADS = ["markov", "gated", "rnn"]


def head_of(kind: str, rank: int = 5) -> SequentialHead:
    torch.manual_seed(3)
    head = SequentialHead(tiny_config("dspark", sequential_head=kind, markov_rank=rank)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return head


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("num_slots", [1, 2, 7, 16])
def test_teacher_forced_equals_step(kind: str, num_slots: int) -> None:
    head = head_of(kind)
    hidden = torch.randn(4, num_slots, HIDDEN, dtype=torch.float64)
    previous = torch.randint(VOCAB, (4, num_slots))
    forced = head.teacher_forced(hidden, previous)
    state = None
    for slot in range(num_slots):
        feature, state = head.step(hidden[:, slot], previous[:, slot], state)
        torch.testing.assert_close(forced[:, slot], feature)
    assert head.bias(forced).shape == (4, num_slots, VOCAB)


@pytest.mark.parametrize("kind", HEADS)
def test_only_the_rnn_remembers_and_none_looks_ahead(kind: str) -> None:
    head = head_of(kind)
    hidden = torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    previous = torch.randint(VOCAB, (1, 6))
    other = previous.clone()
    other[0, 2] = (other[0, 2] + 1) % VOCAB
    moved = (head.teacher_forced(hidden, previous) != head.teacher_forced(hidden, other)).any(-1)[0].tolist()
    assert moved == [False, False, True, kind == "rnn", kind == "rnn", kind == "rnn"]


@pytest.mark.parametrize("kind", HEADS)
def test_proposing_feeds_each_chosen_token_back(tiny_verifier: CausalVerifier, kind: str) -> None:
    """Teacher forcing with the proposal's own tokens gives the logits they were chosen from."""
    for size in (VOCAB, 40):
        draft = tiny_draft(tiny_verifier, tiny_config("dspark", sequential_head=kind, draft_vocab_size=size))
        assert draft.sequential is not None
        hidden, anchors = torch.randn(3, 8, HIDDEN), torch.tensor([5, 50, 90])
        with torch.no_grad():
            proposal = propose(draft, hidden, anchors)
            previous = torch.cat((anchors[:, None], proposal.tokens[:, :-1]), dim=1)
            features = draft.sequential.teacher_forced(hidden, previous)
            torch.testing.assert_close(proposal.logits, draft.logits(hidden) + draft.sequential.bias(features))
        assert torch.equal(proposal.tokens, draft.to_verifier_ids(proposal.logits.argmax(-1)))
        if draft.vocabulary is not None:
            assert bool(draft.vocabulary.t2d[proposal.tokens].all())


@pytest.mark.parametrize(
    "changes", [{}, {"sequential_head": "none", "markov_rank": 0, "confidence_with_previous": False}]
)
def test_a_threshold_ends_proposals_where_survival_falls_under_it(tiny_verifier: CausalVerifier, changes: dict) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config("dspark", **changes))
    hidden, anchors = torch.randn(40, 8, HIDDEN), torch.arange(40)
    with torch.no_grad():
        whole = propose(draft, hidden, anchors).tokens
        previous = torch.cat((anchors[:, None], whole[:, :-1]), dim=1)
        confidence = draft.confidence_logits(hidden, previous)
        assert confidence is not None
        survival = confidence.sigmoid().cumprod(dim=1)
        threshold = float(survival.flatten().quantile(0.6))
        tokens, lengths = propose_all(draft, hidden, anchors, threshold)
    assert lengths.tolist() == (survival >= threshold).sum(dim=1).tolist()
    assert 0 < int(lengths.sum()) < 320
    for row, length in enumerate(lengths.tolist()):
        assert tokens[row, :length].tolist() == whole[row, :length].tolist()
        assert tokens[row, length:].tolist() == [-1] * (8 - length)
