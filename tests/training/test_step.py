"""A step's targets and teacher: the verifier's own tokens and distributions, at the right positions."""

from __future__ import annotations

import pytest
import torch

from blockdraft.data.packing import pack_row
from blockdraft.losses.objective import Objective
from blockdraft.losses.targets import Teacher
from blockdraft.models.vocabulary import DraftVocabulary
from blockdraft.ops.anchors import Blocks, choose_anchors
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.step import block_targets, positions_before, row_loss
from blockdraft.verifiers.causal import CausalVerifier
from conftest import FAMILIES, random_example, tiny_config, tiny_draft, tiny_verifier_of


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_is_the_verifiers_own_distribution(family: str) -> None:
    """Final norm and soft cap as the family has them."""
    verifier = tiny_verifier_of(family)
    example = random_example(20, 5, 1)
    (states,) = InProcess(verifier, (2,), with_final=True).get([example])
    assert states.final is not None
    teacher = Teacher(states.final, torch.arange(20)[None], verifier.head_VE, verifier.logit_softcap)
    wanted = verifier.model(torch.tensor([example.input_ids])).logits[0].float()
    torch.testing.assert_close(teacher.logits(teacher.raw_logits(torch.arange(20))), wanted, rtol=1e-4, atol=1e-4)
    distributions = teacher.distributions(teacher.raw_logits(torch.arange(20)))
    torch.testing.assert_close(distributions.probs, wanted.softmax(-1), rtol=1e-4, atol=1e-6)
    entropy = torch.distributions.Categorical(logits=wanted).entropy()
    torch.testing.assert_close(-distributions.negative_entropy, entropy, rtol=1e-4, atol=1e-4)


def test_what_the_vocabulary_lacks_has_no_loss_and_no_say() -> None:
    vocabulary = DraftVocabulary(tiny_config(draft_vocab_size=3))
    vocabulary.keep(torch.tensor([100, 103, 105]))
    blocks = Blocks(torch.tensor([2, 4]), torch.tensor([0, 0]), torch.tensor([7, 7]))
    targets = block_targets(torch.arange(100, 110), blocks, 3, vocabulary)
    assert targets.mask_NK.tolist() == [[True, True, True], [True, True, False]]
    assert targets.in_vocabulary_NK.tolist() == [[False, True, False], [False, True, False]]
    assert targets.ids_NK[targets.in_vocabulary_NK].tolist() == [1, 2]


def test_the_token_before_a_proposal_is_the_text_and_never_beyond_the_example() -> None:
    blocks = Blocks(torch.tensor([2, 5]), torch.tensor([0, 0]), torch.tensor([7, 7]))
    before, inside = positions_before(blocks, 4)
    assert before.tolist() == [[2, 3, 4, 5], [5, 5, 5, 5]]
    assert inside.tolist() == [[True, True, True, True], [True, False, False, False]]


@pytest.mark.parametrize("sequential", ["markov", "gated", "rnn"])
def test_a_head_learns_from_the_token_before_and_not_from_the_one_to_predict(
    tiny_verifier: CausalVerifier, sequential: str
) -> None:
    """Changing the text at position p changes the loss only through proposals for positions after p."""
    draft = tiny_draft(tiny_verifier, tiny_config("dspark", sequential_head=sequential))
    example = random_example(30, 5, 1)
    (states,) = InProcess(tiny_verifier, draft.config.target_layer_ids).get([example])
    row = pack_row([example])
    blocks = Blocks(torch.tensor([12]), torch.tensor([0]), torch.tensor([30]))
    objective = Objective({"ce": 1.0}, "fixed-exp-decay", decay_gamma=1e-3)  # the first proposal alone counts
    base = float(row_loss(draft, row, [states], blocks, objective).loss.detach())
    for position, matters in ((12, True), (13, False), (14, False)):
        row.tokens[position] = (row.tokens[position] + 1) % 90
        moved = float(row_loss(draft, row, [states], blocks, objective).loss.detach())
        assert (abs(moved - base) > 1e-6) == matters
        row.tokens[position] = example.input_ids[position]


def test_two_losses_add_up_and_confidence_is_one_of_them(tiny_verifier: CausalVerifier) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config("dspark"))
    example = random_example(30, 5, 1)
    (states,) = InProcess(tiny_verifier, draft.config.target_layer_ids, with_final=True).get([example])
    row = pack_row([example])
    blocks = choose_anchors(row.loss_mask, row.lengths, 0)

    def loss(terms: dict[str, float], alpha: float) -> float:
        objective = Objective(terms, "fixed-exp-decay", confidence_alpha=alpha)
        return float(row_loss(draft, row, [states], blocks, objective).loss.detach())

    both = loss({"ce": 0.3, "tv": 0.7}, 0.0)
    assert both == pytest.approx(loss({"ce": 0.3}, 0.0) + loss({"tv": 0.7}, 0.0), rel=1e-5)
    extra = [loss({"tv": 1.0}, alpha) - loss({"tv": 1.0}, 0.0) for alpha in (1.0, 2.0)]
    assert extra[0] > 0 and extra[1] == pytest.approx(2 * extra[0], rel=1e-3)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk_hybrid", "ce"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_confidence_learns_what_the_verifier_accepts_of_all_its_tokens(family: str, loss: str) -> None:
    """A reduced vocabulary, densely: q with zeros for the tokens it lacks, p over the verifier's whole vocabulary."""
    verifier = tiny_verifier_of(family)
    draft = tiny_draft(verifier, tiny_config("dspark", draft_vocab_size=40))
    assert draft.vocabulary is not None and draft.sequential is not None
    example = random_example(30, 5, 1)
    (states,) = InProcess(verifier, draft.config.target_layer_ids, with_final=True).get([example])
    row = pack_row([example])
    blocks = choose_anchors(row.loss_mask, row.lengths, 0)
    objective = Objective({loss: 1.0}, "fixed-exp-decay")
    outcome = row_loss(draft, row, [states], blocks, objective, verifier.logit_softcap, whole_head_VE=verifier.head_VE)

    with torch.no_grad():
        hidden = draft.predicted(draft(states.taps, row.tokens, row.positions, blocks))
        before, inside = positions_before(blocks, hidden.shape[1])
        previous = row.tokens[before]
        features = draft.sequential.teacher_forced(hidden, previous)
        q = draft.vocabulary.expand((draft.logits(hidden) + draft.sequential.bias(features)).softmax(-1))
        assert states.final is not None
        p = verifier.logits(states.final[before]).softmax(-1)
        if loss == "ce":  # no distribution is made for it: p is all on the verifier's own token
            p = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).float()
        wanted = torch.minimum(p, q).sum(-1) * inside
    torch.testing.assert_close(outcome.overlap_NK, wanted, rtol=1e-3, atol=1e-5)
    lacking = inside & ~draft.vocabulary.t2d[p.argmax(-1)]
    assert bool(lacking.any()) and (loss == "ce") == (float(outcome.overlap_NK[lacking].max()) == 0)
    assert outcome.metrics.overlap is not None
    assert float(outcome.metrics.overlap) == pytest.approx(float(wanted.sum()), rel=1e-3)
