"""vLLM itself, on this machine: what it proposes is what the trainer's forward proposes, id by id, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockdraft.decoding.engine import DecodingEngine
from blockdraft.errors import BlockdraftError
from blockdraft.serving.offline import DETAILED, Decoded
from blockdraft.serving.parity import served_rounds
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from serving.fixtures import EAGER, LIMITS, Checkpoint, OwnText, findings_of, real_config

pytestmark = [pytest.mark.real, pytest.mark.engine]

Serve = Callable[..., list[Decoded]]

MIXTURES = {
    "layerwise, one projection, recurrent, from the anchor": (
        real_config("dflare", context_kv="shared", sequential_head="rnn", markov_rank=24, sample_from_anchor=True),
        8,
    ),
    "gated, confident, filling in": (
        real_config("dspark", sequential_head="gated", sample_from_anchor=False, draft_vocab_size=900),
        5,
    ),
    "projected, separate projections, sliding": (real_config("dflash", context_kv="separate", windows=(9, 9)), 7),
    "causal": (real_config("dflare", causal=(True, True)), 7),
}


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_random_drafts_are_served_as_trained(
    random_checkpoint: Callable[..., Checkpoint], serve_offline: Serve, real_verifier: CausalVerifier,
    own_text: OwnText,
    method: str,
) -> None:  # fmt: skip
    checkpoints = [random_checkpoint(real_config(method, draft_vocab_size=size)) for size in (49152, 1500)]
    pairs = [(checkpoint, k) for checkpoint in checkpoints for k in (1, 3, 7)]
    for (checkpoint, k), served in zip(pairs, serve_offline(*pairs), strict=True):
        case = f"{checkpoint.contract.draft_vocab_size} tokens, K={k}"
        assert [reply.tokens for reply in served.replies] == own_text.replies, case
        assert not findings_of(served, checkpoint, real_verifier, own_text, k), case


def test_mixtures_of_sockets_are_served_as_trained(
    random_checkpoint: Callable[..., Checkpoint], serve_offline: Serve, real_verifier: CausalVerifier,
    own_text: OwnText,
) -> None:  # fmt: skip
    pairs = [(random_checkpoint(config), k) for config, k in MIXTURES.values()]
    for name, (checkpoint, k), served in zip(MIXTURES, pairs, serve_offline(*pairs), strict=True):
        assert [reply.tokens for reply in served.replies] == own_text.replies, name
        assert not findings_of(served, checkpoint, real_verifier, own_text, k), name


def test_trained_drafts_are_accepted_as_the_reference_engine_accepts_them(
    trained_checkpoint: Callable[..., Checkpoint], serve_offline: Serve, real_verifier: CausalVerifier,
    own_text: OwnText,
) -> None:  # fmt: skip
    """Found by the engine through the draft's folder alone, as `vllm serve CHECKPOINT` finds both."""
    checkpoints = [trained_checkpoint(method) for method in ("dflash", "dflare", "dspark")]
    pairs = [(checkpoint, checkpoint.contract.default_k) for checkpoint in checkpoints]
    for (checkpoint, k), served in zip(pairs, serve_offline(*pairs, by_folder=True), strict=True):
        method = checkpoint.contract.method
        assert [reply.tokens for reply in served.replies] == own_text.replies, method
        assert not findings_of(served, checkpoint, real_verifier, own_text, k), method
        accepted = 0
        for prompt, reply, limit in zip(own_text.prompts, served.replies, LIMITS, strict=True):
            engine = DecodingEngine(real_verifier, checkpoint.draft, k, SamplingSettings(max_new_tokens=limit))
            (wanted,) = engine.generate([prompt], 1)
            found = [(step.anchor, step.agreed, step.delivered) for step in served_rounds(len(prompt), reply)]
            assert found == [(step.anchor, step.agreed, step.accepted) for step in wanted.rounds], method
            accepted += sum(step.accepted for step in wanted.rounds)
        assert accepted > 10, method  # else the test would only have seen rejections


def test_long_prompts_in_chunks_and_out_of_the_prefix_cache(
    random_checkpoint: Callable[..., Checkpoint], serve_offline: Serve, real_verifier: CausalVerifier,
    own_text: OwnText,
) -> None:  # fmt: skip
    """As engines are set by default: a prompt is read in parts, and what it shares with an earlier one not again."""
    stem = [token for prompt in own_text.prompts for token in prompt]
    prompts = [stem[:200], stem[:330], stem[:330], stem[:300] + stem[-20:], stem[:257]]
    plain = DecodingEngine(real_verifier, None, 0, SamplingSettings(max_new_tokens=20)).generate(prompts, 5)
    text = OwnText(prompts, [reply.tokens for reply in plain])
    pairs = [
        (random_checkpoint(real_config("dflash")), 5),
        (random_checkpoint(real_config("dflare")), 7),
        (random_checkpoint(real_config("dspark", draft_vocab_size=1500)), 3),
    ]
    chunks = {"max_num_batched_tokens": 96, "block_size": 32, "enable_prefix_caching": True}
    outcomes = serve_offline(
        *pairs, prompts=prompts, max_tokens=[20] * 5, max_num_seqs=2, engine=EAGER | DETAILED | chunks,
    )  # fmt: skip
    for (checkpoint, k), served in zip(pairs, outcomes, strict=True):
        method = checkpoint.contract.method
        assert [reply.tokens for reply in served.replies] == text.replies, method
        assert not findings_of(served, checkpoint, real_verifier, text, k), method
        assert served.counters["prefix_hits"] > 300, method


def test_k_beyond_the_trained_one_is_refused_by_the_engine(
    random_checkpoint: Callable[..., Checkpoint], serve_offline: Serve
) -> None:
    with pytest.raises(BlockdraftError, match="num_speculative_tokens: 8: a draft of block size 8 proposes 1 to 7"):
        serve_offline((random_checkpoint(real_config("dflash")), 8))


def test_sampled_drafting_keeps_the_text_greedy_where_it_must_be(
    trained_checkpoint: Callable[..., Checkpoint], serve_offline: Serve, own_text: OwnText
) -> None:
    """Probabilistic drafts of a sequential head: at a temperature near 0 the verifier's own text comes out."""
    checkpoint = trained_checkpoint("dspark")
    speculative = {"model": str(checkpoint.folder), "method": "dflash", "num_speculative_tokens": 4,
                   "draft_sample_method": "probabilistic"}  # fmt: skip
    (served,) = serve_offline(
        (checkpoint, 4), speculative=speculative, sampling={"temperature": 0.02, "seed": 5}, engine=EAGER
    )
    assert [reply.tokens for reply in served.replies] == own_text.replies
    assert served.counters["accepted"] > 0
