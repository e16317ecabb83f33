"""T5Gemma 2 in vLLM: transformers' own text, whatever draft, batch and cache; drafts propose what they should."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from assets.fixtures import LONGEST, SmallDraft
from assets.t5gemma2 import EOI, Asset
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.one_pass import example_proposals
from blockdraft.errors import BlockdraftError
from blockdraft.serving.launcher import engine_environment, speculative_config
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.serving.parity import (
    Finding,
    blocks_of,
    compare_counters,
    compare_reply,
    served_rounds,
    without_padding,
)
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from serving.fixtures import EAGER

pytestmark = [pytest.mark.asset, pytest.mark.engine]

LIMITS = [40, 17, 9, 64, 12, 33, 5, 64, 21, 64, 15, 30]  # of the first prompts: replies end at different times
ALL = 100


def scarce(blocks: int) -> dict[str, int]:
    """So few and small blocks that six requests at once cannot all be kept; one of the longest can."""
    return {"block_size": 32, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 128}


ENVIRONMENT = engine_environment(0, cpu=True, v1_runner=True)


@pytest.fixture(scope="module")
def request_of(
    small_asset: Asset, small_verifier: EncoderDecoderVerifier, heldout_sources: list[list[int]]
) -> Callable[..., Request]:
    def make(small: SmallDraft | None, k: int = 0, count: int = len(LIMITS), **engine: object) -> Request:
        return Request(
            verifier=str(small_asset.verifier), prompts=heldout_sources[:count],
            stop_ids=sorted(small_verifier.stop_ids), max_tokens=limits(count), dtype="float32", max_num_seqs=6,
            max_model_len=128, engine={**EAGER, **(DETAILED if small else {}), **engine},
            speculative=speculative_config(small.folder, small.contract, k, v1_runner=True) if small else None,
        )  # fmt: skip

    return make


def limits(count: int) -> list[int]:
    return (LIMITS + [LONGEST] * ALL)[:count]


@pytest.fixture(scope="module")
def everything(small_replies: list[Reply]) -> list[list[int]]:
    """Transformers' own text for a hundred sources, as the tests of the reference engine show."""
    return [reply.tokens[:limit] for reply, limit in zip(small_replies, limits(ALL), strict=True)]


@pytest.fixture(scope="module")
def wanted(everything: list[list[int]]) -> list[list[int]]:
    return everything[: len(LIMITS)]


def findings_of(
    served: Decoded, small: SmallDraft, verifier: EncoderDecoderVerifier, plain: list[Reply], k: int
) -> list[Finding]:
    """Every block, accepted count and counter against the trainer's forward over the engine's own text."""
    found = compare_counters(served.replies, served.counters, k)
    for index, (own, reply) in enumerate(zip(plain, served.replies, strict=False)):
        example = dataclasses.replace(own, tokens=reply.tokens).example(str(index))
        proposals = example_proposals(verifier, small.draft, example, k)
        blocks = blocks_of(reply, served.blocks)
        reply = without_padding(len(own.prompt), reply, blocks)
        found += compare_reply("vllm", index, own.prompt, reply, proposals, blocks, lambda *_: None, 0.0)
    return found


RANDOM: dict[str, dict[str, object]] = {
    "dflash": {},
    "dspark": {"draft_vocab_size": 700},
    "dflare": {"num_layers": 6, "windows": (None,) * 6, "causal": (False,) * 6, "draft_vocab_size": 700},
}


@pytest.fixture(scope="module")
def random_drafts(small_random_draft: Callable[..., SmallDraft]) -> dict[str, SmallDraft]:
    return {method: small_random_draft(method, **changes) for method, changes in RANDOM.items()}


@pytest.fixture(scope="module")
def outcomes(
    request_of: Callable[..., Request], small_trained_draft: SmallDraft, random_drafts: dict[str, SmallDraft]
) -> dict[str, list[Decoded]]:
    """What the tests look at, by one child."""
    small = small_trained_draft
    requests = {
        "without": [request_of(None, count=ALL), request_of(None, count=ALL, **scarce(60))],
        "trained": [request_of(small, 7, ALL), request_of(small, 3)],
        # How often a request is preempted depends on the draft; three sizes of the cache force it often enough.
        "scarce": [request_of(small, 3, **scarce(blocks)) for blocks in (26, 28, 30)],
        "random": [request_of(draft, 5) for draft in random_drafts.values()],
    }
    answers = iter(decode([request for some in requests.values() for request in some], ENVIRONMENT))
    return {name: list(itertools.islice(answers, len(some))) for name, some in requests.items()}


def test_without_a_draft(outcomes: dict[str, list[Decoded]], everything: list[list[int]]) -> None:
    plenty, few = outcomes["without"]
    assert [reply.tokens for reply in plenty.replies] == everything
    assert [reply.tokens for reply in few.replies] == everything
    assert plenty.counters["preemptions"] == 0 and few.counters["preemptions"] >= 1


def test_with_a_trained_draft(
    outcomes: dict[str, list[Decoded]], wanted: list[list[int]], small_trained_draft: SmallDraft,
    small_verifier: EncoderDecoderVerifier, small_replies: list[Reply], everything: list[list[int]],
) -> None:  # fmt: skip
    """Accepted and rejected tokens, requests that end at different times, preemptions: the same text and rounds."""
    small, trained, few = small_trained_draft, outcomes["trained"], outcomes["scarce"]
    assert [reply.tokens for reply in trained[0].replies] == everything
    for served in [*trained, *few]:
        assert [reply.tokens for reply in served.replies[: len(LIMITS)]] == wanted
        assert 20 < served.counters["accepted"] < served.counters["proposed"] - 20
    for k, served in zip((7, 3), trained, strict=True):
        assert not findings_of(served, small, small_verifier, small_replies, k)
    # A request that comes back gets a token that is no round's; its blocks are judged one by one.
    assert sum(served.counters["preemptions"] for served in few) >= 2
    for index, own in enumerate(small_replies[: len(LIMITS)]):
        example = dataclasses.replace(own, tokens=wanted[index]).example(str(index))
        proposals = example_proposals(small_verifier, small.draft, example, 3)
        for served in few:
            blocks = blocks_of(served.replies[index], served.blocks)
            inside = {anchor: blocks[anchor] for anchor in blocks if anchor in proposals}
            assert inside and inside == {anchor: proposals[anchor] for anchor in inside}
    for own, counted, limit in zip(small_replies, trained[0].replies, LIMITS, strict=False):
        reply = without_padding(len(own.prompt), counted, blocks_of(counted, trained[0].blocks))
        engine = DecodingEngine(small_verifier, small.draft, 7, SamplingSettings(max_new_tokens=limit))
        (alone,) = engine.generate([own.source or []], 1)
        found = [(step.anchor, step.accepted, step.delivered) for step in served_rounds(len(own.prompt), reply)]
        assert found == [(step.anchor, step.accepted, step.delivered) for step in alone.rounds]


def test_random_drafts_are_served_as_trained(
    outcomes: dict[str, list[Decoded]], wanted: list[list[int]], random_drafts: dict[str, SmallDraft],
    small_verifier: EncoderDecoderVerifier, small_replies: list[Reply],
) -> None:  # fmt: skip
    """Embeddings too: a draft that saw them unscaled, or scaled twice, would propose other tokens."""
    for (method, small), served in zip(random_drafts.items(), outcomes["random"], strict=True):
        assert [reply.tokens for reply in served.replies] == wanted, method
        assert not findings_of(served, small, small_verifier, small_replies, 5), method


def test_image_tokens_are_refused_by_the_engine(request_of: Callable[..., Request]) -> None:
    request = request_of(None)
    bad = dataclasses.replace(request, prompts=[[*request.prompts[0], EOI], *request.prompts[1:]])
    with pytest.raises(BlockdraftError, match="stands for an image; only text is supported"):
        decode([bad], ENVIRONMENT)


def test_encoder_outputs_meet_their_own_rows() -> None:
    """A request that comes back after a preemption is scheduled before a new one, but takes a row behind it."""
    pytest.importorskip("vllm")
    from blockdraft.vllm_plugin.t5gemma2.hooks import execute_encoder

    outputs = {name: torch.full((2, 3), float(index)) for index, name in enumerate(("back", "new", "newer"))}
    runner = SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=True),
        input_batch=SimpleNamespace(req_id_to_index={"old": 1, "new": 0, "newer": 2, "back": 3}),
    )
    step = SimpleNamespace(scheduled_encoder_inputs={name: [0] for name in outputs})
    found = execute_encoder(runner, lambda *_: list(outputs.values()), step)
    assert [float(each[0, 0]) for each in found] == [1.0, 2.0, 0.0]
    runner.model_config.is_encoder_decoder = False
    assert execute_encoder(runner, lambda *_: ["as it was"], step) == ["as it was"]
