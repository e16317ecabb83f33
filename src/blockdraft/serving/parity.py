"""Comparing what an engine served with what the trainer's forward says it must propose and accept.

A reply of the engine is walked round by round. Its text must be the verifier's own; every block must hold the tokens
that the draft proposes there in one pass over that text; every count of accepted tokens must be the length of the
prefix that block and text share. What differs first is named, with the stage that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from blockdraft.decoding.identity import Difference, first_difference
from blockdraft.serving.client import Served
from blockdraft.vllm_plugin.record import Blocks

PROPOSED, ACCEPTED = "proposed tokens", "accepted tokens"
STAGES = ("text", PROPOSED, ACCEPTED, "engine counters")

Gap = Callable[[int, int, int, int], "float | None"]
"""(anchor, slot, wanted, found) -> by how much the lower of the two falls short of the draft's best float32 logit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference of a prompt in a stage.

    Attributes:
        engine: "reference" or "vllm".
        prompt: index of the prompt, -1 for what concerns all of them.
        position: index in the sequence, prompt included.
        wanted, found: tokens or counts.
        tie: whether rounding explains it: both tokens lie within the bound of the best float32 logit.
    """

    engine: str
    prompt: int
    stage: str
    position: int
    wanted: object
    found: object
    tie: bool = False
    gap: float | None = None
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class ServedRound:
    """A round of the engine: its anchor's position, how many proposed tokens the verifier accepted, and how many of
    those were delivered. The engine counts the former; tokens behind the end of a reply are nobody's."""

    anchor: int
    accepted: int
    delivered: int


def served_rounds(prompt_length: int, reply: Served) -> list[ServedRound]:
    """The rounds that a reply took, by the engine's own count of accepted tokens."""
    anchor, last = prompt_length, prompt_length + len(reply.tokens) - 1
    rounds = []
    for accepted in reply.accepted:
        rounds.append(ServedRound(anchor, accepted, min(accepted, last - anchor)))
        anchor += accepted + 1
    return rounds


def without_padding(prompt_length: int, reply: Served, blocks: Blocks) -> Served:
    """A reply without the steps that the engine counts although no block was proposed in them.

    vLLM 0.32 runs a request of which one prompt token is left beside requests that decode as if K tokens had been
    proposed for it, and counts K rejections. So begins every T5Gemma 2 request that joins others, and it begins again
    when it is preempted at once. Such steps show as leading zeros with which the rounds do not fit the record of
    blocks, while without them they do.
    """

    def fits(candidate: Served) -> bool:
        last = prompt_length + len(reply.tokens) - 1
        return all(step.anchor in blocks and step.anchor < last for step in served_rounds(prompt_length, candidate))

    zeros = next((index for index, accepted in enumerate(reply.accepted) if accepted), len(reply.accepted))
    candidates = (replace(reply, accepted=reply.accepted[dropped:]) for dropped in range(zeros + 1))
    return next((candidate for candidate in candidates if fits(candidate)), reply)


def blocks_of(reply: Served, recorded: Mapping[str, Blocks]) -> Blocks:
    """The record of a reply's request, whose id in the engine has a suffix."""
    for request, blocks in recorded.items():
        if request == reply.request or request.startswith(f"{reply.request}-"):
            return blocks
    return {}


def text_finding(engine: str, prompt_length: int, d: Difference) -> Finding:
    """A difference of text."""
    return Finding(engine, d.prompt, "text", prompt_length + d.position, d.wanted, d.found, d.is_tie, d.gap, d.bound)


def compare_reply(
    engine: str,
    index: int,
    prompt: Sequence[int],
    reply: Served,
    proposals: Mapping[int, Sequence[int]],
    blocks: Blocks | None,
    gap: Gap,
    bound: float,
) -> list[Finding]:
    """Walk one reply; at most one finding a stage.

    Args:
        proposals: what the draft proposes after each anchor, by position.
        blocks: what the engine proposed, by position; None when it kept no record.
        gap: asked only where tokens differ and the bound is above 0.
        bound: the largest gap that counts as a tie.
    """
    walk = _Walk(engine, index, [*prompt, *reply.tokens], proposals, blocks)
    rounds = served_rounds(len(prompt), reply)
    # A wrong count leads to anchors that are none; what follows it cannot be judged.
    lost = next((number for number, step in enumerate(rounds) if step.anchor not in proposals), None)
    judged = rounds[:lost]
    findings = [
        None if lost is None else walk.differs(ACCEPTED, rounds[lost].anchor, "an anchor inside the reply", "none"),
        _first(walk.proposed_tokens(step, gap, bound) for step in judged),
        _first(walk.accepted_tokens(step) for step in judged),
    ]
    last = len(walk.text) - 1
    end = judged[-1].anchor + judged[-1].accepted + 1 if judged else len(prompt)
    if reply.tokens and end < last and lost is None:
        findings.append(walk.differs(ACCEPTED, end, last, "rounds end before the reply"))
    return [finding for finding in findings if finding is not None]


@dataclass(frozen=True, slots=True)
class _Walk:
    """One reply, and what its rounds are judged by; see `compare_reply`."""

    engine: str
    index: int
    text: list[int]
    proposals: Mapping[int, Sequence[int]]
    blocks: Blocks | None

    def differs(self, stage: str, position: int, wanted: object, found: object) -> Finding:
        return Finding(self.engine, self.index, stage, position, wanted, found)

    def proposed_tokens(self, step: ServedRound, gap: Gap, bound: float) -> Finding | None:
        """The first token of a block that the draft does not propose there."""
        if self.blocks is None:
            return None
        wanted, found = list(self.proposals[step.anchor]), self.blocks.get(step.anchor, [])
        slot = first_difference(wanted, found)
        if slot is None:
            return None
        if slot >= min(len(wanted), len(found)):
            return self.differs(PROPOSED, step.anchor, wanted, found)
        finding = self.differs(PROPOSED, step.anchor + slot + 1, wanted[slot], found[slot])
        short = gap(step.anchor, slot, wanted[slot], found[slot]) if bound else None
        return replace(finding, tie=short is not None and short <= bound, gap=short, bound=bound)

    def accepted_tokens(self, step: ServedRound) -> Finding | None:
        """A count of accepted tokens that is not the length of the prefix that block and text share."""
        # Without a record the trainer's proposals stand in for the engine's.
        block = list(self.proposals[step.anchor]) if self.blocks is None else self.blocks.get(step.anchor, [])
        behind = self.text[step.anchor + 1 : step.anchor + 1 + len(block)]
        difference = first_difference(behind, block[: len(behind)])
        shared = len(behind) if difference is None else difference
        # Where the text ends inside the block, the verifier may have accepted more than the text shows.
        text_ends_first = difference is None and len(behind) < len(block)
        accepted_all_shown = text_ends_first and step.accepted >= shared
        if accepted_all_shown or step.accepted == shared:
            return None
        return self.differs(ACCEPTED, step.anchor, shared, step.accepted)


def _first(findings: Iterable[Finding | None]) -> Finding | None:
    return next((finding for finding in findings if finding is not None), None)


def within(finding: Finding, bound: float) -> Finding:
    """A finding whose gap is known, judged by another bound."""
    return finding if finding.gap is None else replace(finding, tie=finding.gap <= bound, bound=bound)


def compare_counters(replies: Sequence[Served], counters: Mapping[str, int], k: int) -> list[Finding]:
    """The engine's totals against its own account of each request."""
    rounds = sum(len(reply.accepted) for reply in replies)
    wanted = {"drafts": rounds, "proposed": rounds * k, "accepted": sum(sum(reply.accepted) for reply in replies)}
    return [
        Finding("vllm", -1, "engine counters", 0, f"{name} {value}", counters[name])
        for name, value in wanted.items()
        if counters[name] != value
    ]
