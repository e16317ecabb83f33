"""The comparison finds each kind of fault, names its stage, and tells ties from faults."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from blockdraft.decoding.engine import DecodingEngine
from blockdraft.decoding.one_pass import example_proposals
from blockdraft.decoding.slot_gaps import SlotGaps, slot_logits
from blockdraft.pipeline.loading import Pair
from blockdraft.pipeline.parity import past_windows
from blockdraft.records import Example
from blockdraft.serving.client import Served
from blockdraft.serving.parity import blocks_of, compare_counters, compare_reply, served_rounds, within, without_padding
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.vllm_plugin.record import append, read
from conftest import contract_of, random_example, tiny_config, tiny_draft, tiny_verifier_of


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def case(request: pytest.FixtureRequest, tiny_verifier: CausalVerifier):
    """A prompt decoded by the reference engine, as an engine would report it, and what the trainer's forward says."""
    draft = tiny_draft(tiny_verifier, tiny_config(request.param))
    prompt = random_example(12, 11, 3).input_ids
    engine = DecodingEngine(tiny_verifier, draft, 4, SamplingSettings(max_new_tokens=24, ignore_eos=True))
    (reply,) = engine.generate([prompt], 1)
    served = Served("r", reply.tokens, [step.accepted or 0 for step in reply.rounds])
    example = Example.of_reply("0", prompt, reply.tokens, "length")
    proposals = example_proposals(tiny_verifier, draft, example, 4)
    blocks = {step.anchor: list(step.tokens) for step in reply.rounds}
    return prompt, served, proposals, blocks, Pair(tiny_verifier, draft, contract_of(draft, tiny_verifier)), example


def check(case: tuple, served: Served | None = None, blocks: dict | None = None, bound: float = 0.0, gap: float = 9.0):
    prompt, right, proposals, own, _, _ = case
    return compare_reply("vllm", 0, prompt, served or right, proposals, blocks or own, lambda *_: gap, bound)


def test_a_faithful_engine_has_no_finding(case: tuple) -> None:
    assert check(case) == []
    assert compare_reply("vllm", 0, case[0], case[1], case[2], None, lambda *_: None, 0.0) == []


def test_a_wrong_proposal_is_named_with_its_position(case: tuple) -> None:
    anchor = sorted(case[3])[1]
    wrong = {**case[3], anchor: [case[3][anchor][0], case[3][anchor][1] + 1, *case[3][anchor][2:]]}
    found = check(case, blocks=wrong)[0]
    assert (found.stage, found.position, found.tie) == ("proposed tokens", anchor + 2, False)
    assert (found.wanted, found.found) == (case[3][anchor][1], case[3][anchor][1] + 1)
    tie = check(case, blocks=wrong, bound=0.5, gap=0.4)[0]
    assert tie.tie and tie.gap == 0.4 and tie.bound == 0.5
    # The bound of a whole run, known when all of it was compared, has the last word.
    assert not within(tie, 0.3).tie and within(within(tie, 0.3), 0.4).tie
    assert not within(replace(tie, gap=None, tie=False), 9.0).tie
    assert not check(case, blocks=wrong, bound=0.5, gap=0.6)[0].tie


def test_a_block_that_is_missing_or_short_is_a_fault(case: tuple) -> None:
    anchor = sorted(case[3])[0]
    for block in ([], case[3][anchor][:2]):
        found = check(case, blocks={**case[3], anchor: block}, bound=1.0, gap=0.0)[0]
        assert (found.stage, found.position, found.tie) == ("proposed tokens", anchor, False)


def test_a_wrong_count_of_accepted_tokens_is_a_fault(case: tuple) -> None:
    right = case[1]
    for accepted in ([right.accepted[0] + 1, *right.accepted[1:]], right.accepted[:1]):
        stages = {found.stage for found in check(case, dataclasses.replace(right, accepted=accepted))}
        assert "accepted tokens" in stages


def test_counters_are_compared_with_the_requests() -> None:
    replies = [Served("a", [1, 2, 3], [1, 0]), Served("b", [4], [])]
    assert compare_counters(replies, {"drafts": 2, "proposed": 6, "accepted": 1}, 3) == []
    found = compare_counters(replies, {"drafts": 2, "proposed": 7, "accepted": 1}, 3)
    assert [(f.stage, f.wanted, f.found) for f in found] == [("engine counters", "proposed 6", 7)]


def test_tokens_beyond_the_end_are_accepted_and_not_delivered() -> None:
    rounds = served_rounds(10, Served("r", [5, 6, 7, 8, 9], [1, 7]))
    assert [(r.anchor, r.accepted, r.delivered) for r in rounds] == [(10, 1, 1), (12, 7, 2)]


def test_a_record_is_read_back_by_request(tmp_path) -> None:
    path = tmp_path / "blocks.jsonl"
    append(path, ["1-ab", "10-cd"], [5, 9], [[1, 2], [3, 4]])
    append(path, ["1-ab"], [5], [[7, 8]])  # again after a preemption
    found = read(path)
    assert blocks_of(Served("1", [], []), found) == {5: [7, 8]}
    assert blocks_of(Served("10", [], []), found) == {9: [3, 4]}
    assert blocks_of(Served("2", [], []), found) == {}
    assert read(tmp_path / "nothing.jsonl") == {}


def test_slot_logits_are_those_that_proposals_come_from(case: tuple) -> None:
    _, _, proposals, _, pair, example = case
    anchors = sorted(proposals)
    blocks = torch.tensor([proposals[anchor] for anchor in anchors])
    logits = slot_logits(pair, example, anchors, blocks)
    assert torch.equal(logits.argmax(dim=-1), blocks)
    gaps = SlotGaps(pair, pair, example, proposals)
    assert gaps.bound == 0
    second = int(logits[2, 1].topk(2).indices[1])
    expected = float(logits[2, 1].max() - logits[2, 1, second])
    assert gaps.gap(anchors[2], 1, proposals[anchors[2]][1], second) == pytest.approx(expected)


def test_the_bound_of_half_precision_is_measured(case: tuple) -> None:
    _, _, proposals, _, pair, example = case
    rounded = Pair(tiny_verifier_of("llama", torch.bfloat16), pair.draft, pair.contract)
    assert 0 < SlotGaps(pair, rounded, example, proposals).bound <= 1.0


def test_a_step_that_the_engine_only_padded_is_no_round() -> None:
    reply = Served("r", [5, 6, 7, 8, 9, 10], [0, 2, 1])
    blocks = dict.fromkeys((1, 4, 6), (3, 3, 3))
    assert without_padding(1, reply, blocks).accepted == [2, 1]
    again = Served("r", [5, 6, 7, 8, 9, 10], [0, 0, 0, 2, 1])
    assert without_padding(1, again, blocks).accepted == [2, 1]
    right = Served("r", [5, 6, 7, 8, 9, 10], [0, 2, 0])
    assert without_padding(1, right, dict.fromkeys((1, 2, 5, 6), (3, 3, 3))) == right
    nonsense = Served("r", [5, 6, 7, 8, 9, 10], [0, 1, 1])
    assert without_padding(1, nonsense, blocks) is nonsense  # left as it is, for parity to find


def test_a_prompt_goes_past_every_window_that_the_context_holds() -> None:
    """What a wrong window hides shows behind it only: Mistral's 4,096 positions are beyond any ordinary prompt."""
    verifier = tiny_verifier_of("mistral_window")
    draft = tiny_draft(verifier, tiny_config("dflash", windows=(9, 9)))
    pair = Pair(verifier, draft, contract_of(draft, verifier))
    prompts = [[5, 6, 7], [8, 9]]
    longer, unreached = past_windows(prompts, pair, 16, 256)
    assert longer[:2] == prompts and not unreached
    assert longer[2] == [5, 6, 7, 8, 9] * 3 + [5, 6] and len(longer[2]) == 9 + draft.config.block_size
    assert past_windows([[5] * 10], pair, 16, 256) == ([[5] * 10], [])
    assert past_windows(prompts, pair, 16, 44) == ([*prompts, [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]], [])
    assert past_windows(prompts, pair, 16, 30) == (prompts, [4, 9])
    full = tiny_verifier_of("llama")
    other = tiny_draft(full, tiny_config("dflash"))
    assert past_windows(prompts, Pair(full, other, contract_of(other, full)), 16, 256) == (prompts, [])
