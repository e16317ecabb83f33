"""vLLM itself, on this machine: what it proposes is what the trainer's forward proposes, id by id, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from blockdraft.decoding.engine import DecodingEngine
from blockdraft.draft_config import DraftConfig
from blockdraft.errors import BlockdraftError
from blockdraft.serving.offline import DETAILED, Decoded
from blockdraft.serving.parity import served_rounds
from blockdraft.settings import SamplingSettings
from serving.fixtures import (
    EAGER,
    LIMITS,
    SERVED_VOCAB,
    Checkpoint,
    OwnText,
    Speaker,
    findings_of,
    request_of,
    served,
    served_config,
)

pytestmark = pytest.mark.engine

METHODS = ("dflash", "dflare", "dspark")
RANDOM: dict[str, tuple[DraftConfig, int]] = {
    f"{method}, {size} tokens, K={k}": (served_config(method, draft_vocab_size=size), k)
    for method, size, k in itertools.product(METHODS, (SERVED_VOCAB, 300), (1, 3, 7))
}
MIXTURES = {
    "layerwise, one projection, recurrent, from the anchor": (
        served_config("dflare", context_kv="shared", sequential_head="rnn", markov_rank=24, sample_from_anchor=True),
        8,
    ),
    "gated, confident, filling in": (
        served_config("dspark", sequential_head="gated", sample_from_anchor=False, draft_vocab_size=200),
        5,
    ),
    "projected, separate projections, sliding": (served_config("dflash", context_kv="separate", windows=(9, 9)), 7),
    "causal": (served_config("dflare", causal=(True, True)), 7),
}
CHUNKED = {
    "dflash in chunks": (served_config("dflash"), 5),
    "dflare in chunks": (served_config("dflare"), 7),
    "dspark in chunks": (served_config("dspark", draft_vocab_size=300), 3),
}


@dataclass(frozen=True)
class Outcome:
    checkpoint: Checkpoint
    k: int
    text: OwnText
    answer: Decoded


@pytest.fixture(scope="module")
def long_text(random_speaker: Speaker) -> OwnText:
    """Prompts longer than a chunk, most of which begin as another does."""
    stem = [token for prompt in random_speaker.text.prompts for token in prompt]
    prompts = [stem[:200], stem[:330], stem[:330], stem[:300] + stem[-20:], stem[:257]]
    plain = DecodingEngine(random_speaker.verifier, None, 0, SamplingSettings(max_new_tokens=20)).generate(prompts, 5)
    return OwnText(prompts, [reply.tokens for reply in plain])


@pytest.fixture(scope="module")
def outcomes(
    random_checkpoint: Callable[..., Checkpoint], random_speaker: Speaker, long_text: OwnText
) -> dict[str, Outcome]:
    """All random drafts, each in an engine of its own, in one child."""
    chunks = {"max_num_batched_tokens": 96, "block_size": 32, "enable_prefix_caching": True}
    long = {
        "prompts": long_text.prompts,
        "max_tokens": [20] * 5,
        "max_num_seqs": 2,
        "engine": EAGER | DETAILED | chunks,
    }
    plans = [
        (name, random_checkpoint(config), k, long_text if cases is CHUNKED else random_speaker.text)
        for cases in (RANDOM, MIXTURES, CHUNKED)
        for name, (config, k) in cases.items()
    ]
    answers = served(
        [request_of(random_speaker, draft, k, **(long if text is long_text else {})) for _, draft, k, text in plans]
    )
    return {plan[0]: Outcome(*plan[1:], answer) for plan, answer in zip(plans, answers, strict=True)}


@pytest.mark.parametrize("name", [*RANDOM, *MIXTURES, *CHUNKED])
def test_random_drafts_are_served_as_trained(outcomes: dict[str, Outcome], random_speaker: Speaker, name: str) -> None:
    one = outcomes[name]
    assert [reply.tokens for reply in one.answer.replies] == one.text.replies
    assert not findings_of(one.answer, one.checkpoint, random_speaker.verifier, one.text, one.k)


@pytest.mark.parametrize("name", CHUNKED)
def test_long_prompts_come_in_chunks_and_out_of_the_prefix_cache(outcomes: dict[str, Outcome], name: str) -> None:
    """As engines are set by default: a prompt is read in parts, and what it shares with an earlier one not again."""
    assert outcomes[name].answer.counters["prefix_hits"] > 300


def test_k_beyond_the_trained_one_is_refused_by_the_engine(
    random_checkpoint: Callable[..., Checkpoint], random_speaker: Speaker
) -> None:
    request = request_of(random_speaker, random_checkpoint(served_config("dflash")), 8)
    with pytest.raises(BlockdraftError, match="num_speculative_tokens: 8: a draft of block size 8 proposes 1 to 7"):
        served([request])


@pytest.fixture(scope="module")
def trained(trained_checkpoint: Callable[..., Checkpoint], real_speaker: Speaker) -> dict[str, Outcome]:
    """Trained drafts of the real verifier, found by the engine through the draft's folder alone, as `vllm serve
    CHECKPOINT` finds both; and a sequential head whose proposals are sampled."""
    drafts = {method: trained_checkpoint(method) for method in METHODS}
    dspark = drafts["dspark"]
    speculative = {"model": str(dspark.folder), "method": "dflash", "num_speculative_tokens": 4,
                   "draft_sample_method": "probabilistic"}  # fmt: skip
    requests = [
        request_of(real_speaker, draft, draft.contract.draft.num_speculative_tokens, by_folder=True)
        for draft in drafts.values()
    ]
    requests.append(
        request_of(
            real_speaker, dspark, 4, speculative=speculative, sampling={"temperature": 0.02, "seed": 5}, engine=EAGER
        )
    )
    plans = [(draft, draft.contract.draft.num_speculative_tokens) for draft in drafts.values()] + [(dspark, 4)]
    answers = zip(plans, served(requests), strict=True)
    return {
        name: Outcome(*plan, real_speaker.text, answer)
        for name, (plan, answer) in zip([*METHODS, "sampled"], answers, strict=True)
    }


@pytest.mark.real
@pytest.mark.parametrize("method", METHODS)
def test_trained_drafts_are_accepted_as_the_reference_engine_accepts_them(
    trained: dict[str, Outcome], real_speaker: Speaker, method: str
) -> None:
    one, verifier = trained[method], real_speaker.verifier
    assert [reply.tokens for reply in one.answer.replies] == one.text.replies
    assert not findings_of(one.answer, one.checkpoint, verifier, one.text, one.k)
    accepted = 0
    for prompt, reply, limit in zip(one.text.prompts, one.answer.replies, LIMITS, strict=True):
        engine = DecodingEngine(verifier, one.checkpoint.draft, one.k, SamplingSettings(max_new_tokens=limit))
        (wanted,) = engine.generate([prompt], 1)
        found = [(step.anchor, step.accepted, step.delivered) for step in served_rounds(len(prompt), reply)]
        assert found == [(step.anchor, step.accepted, step.delivered) for step in wanted.rounds]
        accepted += sum(step.delivered for step in wanted.rounds)
    assert accepted > 10  # else the test would only have seen rejections


@pytest.mark.real
def test_sampled_drafting_keeps_the_text_greedy_where_it_must_be(trained: dict[str, Outcome]) -> None:
    """Probabilistic drafts of a sequential head: at a temperature near 0 the verifier's own text comes out."""
    one = trained["sampled"]
    assert [reply.tokens for reply in one.answer.replies] == one.text.replies
    assert one.answer.counters["accepted"] > 0
