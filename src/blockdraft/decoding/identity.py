"""Is the text the verifier's own? Token by token, and where it is not, whether a near-tie explains it.

Token-identity is a claim about float32. In bfloat16 a pass over eight tokens rounds differently from a pass over one,
so that tokens whose logits nearly coincide may change places. Such a difference is accepted only when it is shown: in
the float32 verifier both tokens must lie within a bound of the best one (they need not be the first two, as three
tokens can be that close). The bound is what rounding does to the gap of two logits of this verifier, measured on the
same replies; it may never exceed TIE_CEILING, so that a broken half-precision pass cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blockdraft.decoding.engine import Reply
from blockdraft.verifiers.base import Verifier

TIE_CEILING = 1.0
"""No gap of float32 logits above this is a tie, whatever noise was measured. Neighboring bfloat16 numbers from 16 to
32 are 0.125 apart, and the hidden states behind such logits have been rounded in every layer."""
NOISE_GROUP = 16  # replies whose states are made together


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two replies to a prompt first differ.

    Attributes:
        prompt: index of the prompt.
        position: index of the token in the reply.
        wanted, found: the token of the plain reply and of the other; -1 where a reply has ended.
        gap: by how much the float32 logit of the lower of the two falls short of the best; None where a reply ended.
        bound: the largest gap that counts as a tie.
    """

    prompt: int
    position: int
    wanted: int
    found: int
    gap: float | None
    bound: float

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.gap <= self.bound


def first_difference(wanted: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token in which two replies differ, or None when they are the same."""
    for index, (a, b) in enumerate(zip(wanted, found, strict=False)):
        if a != b:
            return index
    return None if len(wanted) == len(found) else min(len(wanted), len(found))


def tie_bound(exact: Verifier, rounded: Verifier, replies: Sequence[Reply]) -> float:
    """The largest error that `rounded` makes in the gap of the two best logits, over all positions of the replies.

    0 where both are the same verifier: in float32 nothing is a tie.
    """
    if rounded is exact:
        return 0.0
    largest = 0.0
    for first in range(0, len(replies), NOISE_GROUP):
        group = replies[first : first + NOISE_GROUP]
        texts = [torch.tensor(reply.prompt + reply.tokens[:-1]) for reply in group]
        sources = [reply.source for reply in group]
        pairs = zip(group, exact.states(texts, [], sources), rounded.states(texts, [], sources), strict=True)
        for reply, wanted, found in pairs:
            start = len(reply.prompt) - 1
            logits = exact.logits(wanted.final[start:])
            best = logits.topk(2, dim=-1).indices
            gaps = [each.gather(1, best) for each in (logits, rounded.logits(found.final[start:]))]
            noise = (gaps[0][:, 0] - gaps[0][:, 1]) - (gaps[1][:, 0] - gaps[1][:, 1])
            largest = max(largest, float(noise.abs().max()))
    return min(largest, TIE_CEILING)


def differences(
    verifier_float32: Verifier, plain: Sequence[Reply], drafted: Sequence[Reply], bound: float
) -> list[Difference]:
    """The first difference of every pair of replies that is not token-identical, each with its float32 gap.

    Args:
        bound: the largest gap that counts as a tie (`tie_bound`).
    """
    found = []
    for wanted, other in zip(plain, drafted, strict=True):
        position = first_difference(wanted.tokens, other.tokens)
        if position is None:
            continue
        pair = [reply.tokens[position] if position < len(reply.tokens) else -1 for reply in (wanted, other)]
        gap = _gap(verifier_float32, wanted, position, pair[0], pair[1])
        found.append(Difference(wanted.index, position, pair[0], pair[1], gap, bound))
    return found


def _gap(verifier: Verifier, reply: Reply, position: int, wanted: int, found: int) -> float | None:
    if -1 in (wanted, found):
        return None
    text = torch.tensor(reply.prompt + reply.tokens[:position])
    (states,) = verifier.states([text], [], [reply.source])
    logits = verifier.logits(states.final[-1])
    return float(logits.max() - torch.minimum(logits[wanted], logits[found]))
