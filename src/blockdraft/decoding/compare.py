"""Decoding the same prompts with and without a draft, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockdraft.decoding.engine import DecodingEngine, Reply


@dataclass(slots=True)
class Comparison:
    """Replies and wall-clock seconds of both ways, prefill included."""

    plain: list[Reply] = field(default_factory=list)
    with_draft: list[Reply] = field(default_factory=list)
    plain_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def plain_rate(self) -> float:
        """Tokens a second without the draft."""
        return sum(len(reply.tokens) for reply in self.plain) / self.plain_seconds

    @property
    def draft_rate(self) -> float:
        """Tokens a second with the draft."""
        return sum(len(reply.tokens) for reply in self.with_draft) / self.draft_seconds

    @property
    def speedup(self) -> float:
        return self.draft_rate / self.plain_rate


def compare(
    plain: DecodingEngine,
    with_draft: DecodingEngine,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    on_done: Callable[[int], None] | None = None,
) -> Comparison:
    """Decode batch after batch, each both ways before the next, so that a drifting machine slows both alike."""
    result = Comparison()
    plain.generate(prompts[:1], 1)  # first calls allocate and load code; neither side should pay for it
    with_draft.generate(prompts[:1], 1)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        start = time.perf_counter()
        result.plain += plain.generate(batch, batch_size)
        middle = time.perf_counter()
        result.with_draft += with_draft.generate(batch, batch_size)
        result.plain_seconds += middle - start
        result.draft_seconds += time.perf_counter() - middle
        if on_done:
            on_done(len(batch))
    return result
