"""K by the number of requests at once, and the self-test that says what to choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blockdraft.decoding.one_pass import example_proposals
from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.serving.launcher import speculative_config
from blockdraft.serving.load import Rate, engine_ranges, read_steps, report
from blockdraft.serving.parity import blocks_of
from conftest import contract_of, tiny_config, tiny_draft, tiny_verifier_of
from serving.fixtures import Checkpoint, Speaker, request_of, served, served_config

pytestmark = pytest.mark.engine


def test_steps_are_read_and_given_to_the_engine() -> None:
    verifier = tiny_verifier_of("llama")
    contract = contract_of(tiny_draft(verifier, tiny_config("dflash")), verifier)
    assert engine_ranges(read_steps(("2:7", "4:3", "8:0"), contract)) == [[1, 2, 7], [3, 4, 3], [5, 8, 0]]
    for given, says in (
        (("2",), "--k-by-load: 2: give pairs UP_TO:K"),
        (("a:1",), "give pairs UP_TO:K"),
        (("4:3", "2:7"), "--k-by-load: 2:7: numbers of requests must be above 0 and rise"),
        (("0:3",), "must be above 0"),
        (("2:8",), "--k-by-load: 8: a draft of block size 8 proposes 1 to 7"),
        (("2:-1",), "--k-by-load: -1: a draft"),
        (("2:0",), "--k-by-load: 2:0: never proposes anything"),
    ):
        with pytest.raises(InputError, match=says):
            read_steps(given, contract)


def test_k_follows_the_load_and_every_block_is_the_trainers(
    random_checkpoint: Callable[..., Checkpoint], random_speaker: Speaker
) -> None:
    """Four requests at once propose nothing, three two tokens a round, two and one all; also from the anchor."""
    steps, text = [(2, 7), (3, 2), (4, 0)], random_speaker.text
    checkpoints = [random_checkpoint(served_config("dflash"))]
    checkpoints.append(random_checkpoint(served_config("dspark", sample_from_anchor=True)))
    requests = [
        request_of(
            random_speaker, each, 7, speculative=speculative_config(each.folder, each.contract, 7, True, steps)
        )
        for each in checkpoints
    ]  # fmt: skip
    for checkpoint, answer in zip(checkpoints, served(requests), strict=True):
        assert [reply.tokens for reply in answer.replies] == text.replies
        seen = set()
        for prompt, reply in zip(text.prompts, answer.replies, strict=True):
            example = Example.of_reply("x", prompt, reply.tokens, "length")
            wanted = {k: example_proposals(random_speaker.verifier, checkpoint.draft, example, k) for k in (2, 7)}
            for anchor, drafted in blocks_of(reply, answer.blocks).items():
                seen.add(len(drafted))
                assert drafted == wanted[len(drafted)].get(anchor, drafted)  # behind a reply's end there is no text
        assert seen == {2, 7}


def test_the_report_says_where_the_draft_stops_paying() -> None:
    plain = [Rate(1, 10.0), Rate(2, 20.0), Rate(4, 40.0)]

    def last(*rates: float) -> str:
        return report(plain, [Rate(each.requests, rate) for each, rate in zip(plain, rates, strict=True)], 5)[-1]

    lines = report(plain, [Rate(1, 25.0), Rate(2, 20.1), Rate(4, 30.0)], 5)
    assert lines[0] == "self-test, requests at once 1: 10.0 tokens/s without the draft, 25.0 with it (2.50)"
    assert lines[-1].endswith("the draft pays with up to 2 requests at once; serve with --k-by-load 2:5 3:0")
    assert "as far as was tried" in last(11, 21, 41)
    assert "slows this machine down" in last(9, 30, 50)
