"""The acceptance rule: greedy prefix, walk of rounds, and losslessness of rejection sampling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.ops.acceptance import AcceptanceCounts, Round, accept_sampled, accepted_prefix, walk_rounds
from blockdraft.ops.sampling import sampling_probs


@given(st.integers(1, 8), st.integers(0, 6))
def test_accepted_prefix_is_the_leading_run(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randint(2, (5, k), generator=generator), torch.randint(2, (5, k), generator=generator)
    wanted = [next((i for i in range(k) if x[i] != y[i]), k) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert accepted_prefix(a, b).tolist() == wanted


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_rounds_cover_a_reply_exactly(accepted: list[int]) -> None:
    first, last = 10, 10 + len(accepted)
    rounds = walk_rounds(accepted, [(3,) * 7] * len(accepted), first, last)
    position = first
    for r in rounds:
        assert r.anchor == position
        position += r.delivered + 1
    # The last round may end with the reply's last token accepted, without a bonus behind it.
    assert position in (last, last + 1)


def test_a_reply_of_one_token_takes_no_round() -> None:
    assert walk_rounds([], [], 5, 5) == []


def test_rounds_are_equal_when_they_proposed_the_same_tokens() -> None:
    assert Round(4, (7, 8), 1) == Round(4, (7, 8), 1, accepted=2)
    assert Round(4, (7, 8), 1) != Round(4, (7, 9), 1)
    assert Round(4, (7, 8), 1) != Round(4, (7, 8), 0)


def test_counts_derive_from_rounds() -> None:
    counts = AcceptanceCounts.of([Round(0, (7, 8, 9), 3), Round(4, (7, 8, 9), 0), Round(5, (7, 8, 9), 1)], 3)
    assert (counts.rounds, counts.proposed, counts.accepted) == (3, 9, 4)
    assert counts.accepted_per_position == (2, 1, 1)
    assert counts.acceptance_length == pytest.approx(1 + 4 / 3)
    assert counts.acceptance_rate == pytest.approx(4 / 9)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_tokens_follow_the_verifier_by_chi_square(temperature: float) -> None:
    """First and second emitted token over five tokens and 20,000 draws, against the verifier's own distribution."""
    rows, vocab = 20_000, 5
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, vocab, generator=generator)
    verifier = sampling_probs(logits, temperature, 0, 1.0).expand(rows, 3, vocab)
    draft = torch.softmax(torch.randn(2, vocab, generator=generator), -1).expand(rows, 2, vocab)
    drafted = torch.stack([torch.multinomial(draft[:, i], 1, generator=generator)[:, 0] for i in range(2)], 1)
    outcome = accept_sampled(drafted, draft, verifier, generator)
    first = torch.where(outcome.accepted > 0, drafted[:, 0], outcome.bonus)
    assert _chi_square(first, verifier[0, 0]) < 18.5  # 0.999 quantile, 4 degrees of freedom
    went_on = outcome.accepted >= 1
    second = torch.where(outcome.accepted > 1, drafted[:, 1], outcome.bonus)[went_on]
    assert _chi_square(second, verifier[0, 1]) < 18.5
    third = outcome.bonus[outcome.accepted == 2]
    assert _chi_square(third, verifier[0, 2]) < 18.5


def test_tokens_chosen_without_chance_follow_the_verifier_too() -> None:
    """A proposal that was not drawn is accepted with the verifier's probability, and never comes back when rejected."""
    rows, vocab = 20_000, 5
    generator = torch.Generator().manual_seed(4)
    verifier = torch.softmax(torch.randn(3, vocab, generator=generator), -1).expand(rows, 3, vocab)
    drafted = torch.tensor([[1, 3]]).expand(rows, 2)
    outcome = accept_sampled(drafted, None, verifier, generator)
    first = torch.where(outcome.accepted > 0, drafted[:, 0], outcome.bonus)
    assert _chi_square(first, verifier[0, 0]) < 18.5
    assert not bool((outcome.bonus[outcome.accepted == 0] == 1).any())
    second = torch.where(outcome.accepted > 1, drafted[:, 1], outcome.bonus)[outcome.accepted >= 1]
    assert _chi_square(second, verifier[0, 1]) < 18.5


def test_rows_may_propose_less_and_stay_lossless() -> None:
    """Half of the rows propose one token of two: the bonus behind it is the verifier's own, not a residual."""
    rows, vocab = 40_000, 5
    generator = torch.Generator().manual_seed(5)
    verifier = torch.softmax(torch.randn(3, vocab, generator=generator), -1).expand(rows, 3, vocab)
    draft = torch.softmax(torch.randn(2, vocab, generator=generator), -1).expand(rows, 2, vocab)
    drafted = torch.stack([torch.multinomial(draft[:, i], 1, generator=generator)[:, 0] for i in range(2)], 1)
    lengths = torch.arange(rows) % 3
    outcome = accept_sampled(drafted, draft, verifier, generator, lengths)
    assert bool((outcome.accepted <= lengths).all())
    for length in range(3):
        mine = lengths == length
        first = torch.where(outcome.accepted > 0, drafted[:, 0], outcome.bonus)[mine]
        assert _chi_square(first, verifier[0, 0]) < 18.5
        second = torch.where(outcome.accepted > 1, drafted[:, 1], outcome.bonus)[mine & (outcome.accepted >= 1)]
        if length:
            assert _chi_square(second, verifier[0, 1]) < 18.5


def test_equal_distributions_accept_everything() -> None:
    probs = torch.softmax(torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)), -1)
    drafted = probs[:, :2].argmax(-1)
    outcome = accept_sampled(drafted, probs[:, :2], probs, torch.Generator().manual_seed(1))
    assert outcome.accepted.tolist() == [2, 2, 2, 2]


def test_top_k_and_top_p_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (sampling_probs(logits, 1.0, 2, 1.0) > 0).tolist() == [True, True, False, False]
    assert (sampling_probs(logits, 1.0, 0, 0.6) > 0).tolist() == [True, True, False, False]
    assert (sampling_probs(logits, 1.0, 0, 1e-9) > 0).tolist() == [True, False, False, False]
    torch.testing.assert_close(sampling_probs(logits, 1.0, 0, 0.6).sum(), torch.tensor(1.0))


def _chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    observed = tokens.bincount(minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    return float(((observed - expected) ** 2 / expected).sum())
