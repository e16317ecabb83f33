"""The reference engine: the verifier's own text, whatever the draft says, and the counts that one pass predicts."""

from __future__ import annotations

import pytest
import torch

from blockdraft.decoding.compare import compare
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.identity import TIE_CEILING, differences, first_difference, tie_bound
from blockdraft.decoding.one_pass import one_pass_acceptance
from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from conftest import FAMILIES, random_example, tiny_config, tiny_draft, tiny_verifier_of

PROMPTS = [random_example(n, 1, n).input_ids for n in (3, 41, 17, 9, 26)]


def decode(verifier, draft, k: int, batch: int = 2, prompts=PROMPTS, **sampling) -> list[Reply]:
    settings = SamplingSettings(**{"max_new_tokens": 24, "ignore_eos": True, **sampling})
    return DecodingEngine(verifier, draft, k, settings).generate(prompts, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_the_librarys_own_greedy_text(family: str) -> None:
    verifier = tiny_verifier_of(family)
    for reply in decode(verifier, None, 0, batch=3):
        prompt = torch.tensor([reply.prompt])
        out = verifier.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert reply.tokens == out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_any_draft_leaves_the_text_unchanged_and_counts_equal_one_pass(family: str, method: str) -> None:
    verifier = tiny_verifier_of(family)
    draft = tiny_draft(verifier, tiny_config(method))
    plain = decode(verifier, None, 0)
    examples = [Example.of_reply(str(r.index), r.prompt, r.tokens, "length") for r in plain]
    predicted = one_pass_acceptance(verifier, draft, examples, range(1, 8))
    assert all(p.disagreements == 0 for p in predicted)
    for k in range(1, 8):
        drafted = decode(verifier, draft, k, batch=1 + k % 4)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
        assert [r.rounds for r in drafted] == [p.rounds[k] for p in predicted]


class OracleDraft(torch.nn.Module):
    """Proposes the verifier's own text with every third proposal spoilt: rejections at every slot, and full blocks."""

    def __init__(self, verifier: CausalVerifier, plain: list[Reply]) -> None:
        super().__init__()
        self.inner = tiny_draft(verifier, tiny_config())
        self.config, self.norm = self.inner.config, self.inner.norm
        self.sequential = self.confidence = self.vocabulary = None
        self.predicted, self.slots_for = self.inner.predicted, self.inner.slots_for
        self.to_verifier_ids = self.inner.to_verifier_ids
        self.texts = [reply.prompt + reply.tokens for reply in plain]
        self.calls = 0

    def cache(self, rows: int):
        return self.inner.cache(rows)

    def extend_context(self, cache, taps) -> None:
        self.inner.extend_context(cache, taps)

    def block_hidden(self, cache, anchors, block_size: int) -> torch.Tensor:
        self.inner.block_hidden(cache, anchors, block_size)
        drafted = torch.zeros(len(anchors), block_size, dtype=torch.int64)
        for row, (anchor, length) in enumerate(zip(anchors.tolist(), cache.lengths.tolist(), strict=True)):
            (text,) = {tuple(t) for t in self.texts if len(t) > length and t[length] == anchor}
            following = (list(text[length + 1 : length + block_size]) + [3] * block_size)[: block_size - 1]
            drafted[row, 1:] = torch.tensor(following)
            if self.calls % 3:
                drafted[row, 1 + self.calls % (block_size - 1)] += 1
            self.calls += 1
        return drafted

    def logits(self, drafted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(drafted, 129).float()[..., :128]


def test_an_oracle_is_accepted_and_its_spoilt_tokens_are_not(tiny_verifier: CausalVerifier) -> None:
    prompts = PROMPTS[1:4]
    plain = decode(tiny_verifier, None, 0, prompts=prompts)
    oracle = OracleDraft(tiny_verifier, plain)
    drafted = decode(tiny_verifier, oracle, 7, batch=1, prompts=prompts)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    accepted = {r.delivered for reply in drafted for r in reply.rounds}
    assert max(accepted) == 7 and len(accepted) >= 4


def test_a_prompts_reply_does_not_depend_on_its_batch(tiny_verifier: CausalVerifier) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config("dflare"))
    shared = list(range(3, 60))
    prompts = [shared + [60 + i] * (1 + i) for i in range(4)]
    together = decode(tiny_verifier, draft, 5, batch=4, prompts=prompts)
    alone = [decode(tiny_verifier, draft, 5, batch=1, prompts=[p])[0] for p in prompts]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.rounds for r in together] == [r.rounds for r in alone]


def test_stop_token_stop_string_and_length(tiny_verifier: CausalVerifier) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())
    free = decode(tiny_verifier, None, 0)[1].tokens
    word = tiny_verifier.tokenizer.decode([free[5]])
    first = next(i for i, token in enumerate(free) if token == free[5])
    for k in (0, 4):
        stopped = decode(tiny_verifier, draft, k, prompts=PROMPTS[1:2], stop=(word,))[0]
        assert stopped.finish == "stop" and stopped.tokens == free[: first + 1]
        cut = decode(tiny_verifier, draft, k, prompts=PROMPTS[1:2], max_new_tokens=6)[0]
        assert cut.finish == "length" and cut.tokens == free[:6]
    tiny_verifier_with_stop = tiny_verifier_of("llama")
    tiny_verifier_with_stop.stop_ids = frozenset({free[5]})
    for k in (0, 4):
        reply = decode(tiny_verifier_with_stop, draft, k, prompts=PROMPTS[1:2], ignore_eos=False)[0]
        assert reply.finish == "stop" and reply.tokens == free[: first + 1]


def test_accepted_tokens_beyond_the_end_do_not_count(tiny_verifier: CausalVerifier) -> None:
    plain = decode(tiny_verifier, None, 0, prompts=PROMPTS[1:2], max_new_tokens=24)
    oracle = OracleDraft(tiny_verifier, plain)
    oracle.calls = 0
    reply = decode(tiny_verifier, oracle, 7, batch=1, prompts=PROMPTS[1:2], max_new_tokens=4)[0]
    assert len(reply.tokens) == 4
    assert sum(r.delivered for r in reply.rounds) + len(reply.rounds) >= 3
    assert reply.rounds[0].delivered == 3  # seven would have been right, three were wanted


def test_prompt_limits(tiny_verifier: CausalVerifier) -> None:
    with pytest.raises(InputError, match="300 tokens"):
        decode(tiny_verifier, None, 0, prompts=[[5] * 300])
    with pytest.raises(InputError, match="empty"):
        decode(tiny_verifier, None, 0, prompts=[[]])
    full = decode(tiny_verifier, tiny_draft(tiny_verifier, tiny_config()), 7, prompts=[[5] * 250], max_new_tokens=50)[0]
    assert len(full.tokens) == 6 and full.finish == "length"


@pytest.mark.parametrize(("method", "least"), [("greedy", 0.002), ("probabilistic", 0.05)])
def test_sampled_text_follows_the_verifier_by_chi_square(
    tiny_verifier: CausalVerifier, method: str, least: float
) -> None:
    """The second token of 4,000 replies with a draft, against the verifier's own mixture over all first tokens."""
    draft = tiny_draft(tiny_verifier, tiny_config())
    prompt = PROMPTS[0]
    settings = SamplingSettings(
        max_new_tokens=3, ignore_eos=True, temperature=4.0, seed=5, draft_sample_method=method
    )  # fmt: skip
    replies = DecodingEngine(tiny_verifier, draft, 2, settings).generate([prompt] * 4000, 2000)
    sampler = DecodingEngine(tiny_verifier, None, 0, settings)
    every = torch.arange(128)
    texts = [torch.tensor(prompt), *torch.cat([torch.tensor(prompt).expand(128, -1), every[:, None]], dim=1)]
    finals = torch.stack([states.final[-1] for states in tiny_verifier.states(texts, [])])
    probs = sampler._probs(tiny_verifier.logits(finals)).double()
    second = probs[0] @ probs[1:]
    seen = torch.tensor([reply.tokens[1] for reply in replies]).bincount(minlength=128)
    expected = 4000 * second
    frequent = expected >= 5
    statistic = float(((seen - expected) ** 2 / expected)[frequent].sum())
    count = int(frequent.sum())
    assert count > 50
    assert statistic < count + 4 * (2 * count) ** 0.5
    rounds = [r for reply in replies for r in reply.rounds]
    assert least < sum(r.delivered > 0 for r in rounds) / len(rounds) < 0.95


def test_sampling_follows_its_seed(tiny_verifier: CausalVerifier) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config())

    def run(seed: int) -> list[list[int]]:
        return [r.tokens for r in decode(tiny_verifier, draft, 3, temperature=1.0, seed=seed)]

    assert run(1) == run(1) != run(2)


def test_differences_are_ties_only_near_the_best(tiny_verifier: CausalVerifier) -> None:
    plain = decode(tiny_verifier, None, 0, prompts=PROMPTS[1:3])
    text = plain[0].prompt + plain[0].tokens[:4]
    logits = tiny_verifier.logits(tiny_verifier.states([torch.tensor(text)], [])[0].final[-1])
    best, second, third = logits.topk(3).indices.tolist()
    other = Reply(0, plain[0].prompt, 24, [*plain[0].tokens[:4], second, 9])
    (found,) = differences(tiny_verifier, plain[:1], [other], 0.2)
    assert (found.position, found.wanted, found.found) == (4, best, second)
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert found.is_tie == (found.gap <= 0.2)
    assert differences(tiny_verifier, plain[:1], [other], found.gap + 1e-3)[0].is_tie
    further = Reply(0, plain[0].prompt, 24, [*plain[0].tokens[:4], third])
    gap = float(logits[best] - logits[third])
    assert differences(tiny_verifier, plain[:1], [further], 0.2)[0].gap == pytest.approx(gap, abs=1e-4)
    wrong = Reply(0, plain[0].prompt, 24, [*plain[0].tokens[:4], int(logits.argmin())])
    assert not differences(tiny_verifier, plain[:1], [wrong], TIE_CEILING)[0].is_tie
    ended = Reply(0, plain[0].prompt, 24, plain[0].tokens[:4])
    assert differences(tiny_verifier, plain[:1], [ended], 0.2)[0].gap is None
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_the_bound_is_what_rounding_does_and_never_more_than_the_ceiling(tiny_verifier: CausalVerifier) -> None:
    plain = decode(tiny_verifier, None, 0)
    rounded = tiny_verifier_of("llama", torch.bfloat16)
    assert tie_bound(tiny_verifier, tiny_verifier, plain) == 0.0
    bound = tie_bound(tiny_verifier, rounded, plain)
    assert 0 < bound < TIE_CEILING
    with torch.no_grad():
        rounded.model.get_decoder().norm.weight.mul_(3)  # not rounding any more
    assert tie_bound(tiny_verifier, rounded, plain) == TIE_CEILING


def test_compare_returns_both_ways_in_prompt_order(tiny_verifier: CausalVerifier) -> None:
    sampling = SamplingSettings(max_new_tokens=8, ignore_eos=True)
    draft = tiny_draft(tiny_verifier, tiny_config())
    done: list[int] = []
    both = compare(
        DecodingEngine(tiny_verifier, None, 0, sampling),
        DecodingEngine(tiny_verifier, draft, 3, sampling),
        PROMPTS,
        2,
        done.append,
    )
    assert [r.tokens for r in both.plain] == [r.tokens for r in both.with_draft]
    assert [r.prompt for r in both.plain] == PROMPTS
    assert sum(done) == len(PROMPTS) and both.speedup > 0
