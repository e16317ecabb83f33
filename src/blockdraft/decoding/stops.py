"""When a reply ends: with the end of its turn, with a stop string, or at its limit.

Stop strings are looked for in the text of a window of the newest tokens, since decoding a reply from its start at every
token takes time that grows with its square. Where the window starts is no matter of a number of tokens: a token may be
empty, a part of a character, or a word whose space depends on the token before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Characters before a stop string that a window has, too: as many as a token can still change of the text before it. The
# end of a text may be a part of a character, and a tokenizer that cleans up spaces joins "do" and "n't" later.
MARGIN = 8
REPLACEMENT = "\ufffd"  # what a part of a character decodes to


@dataclass(slots=True)
class StopWindow:
    """The newest tokens of one reply, from `start` on."""

    start: int = 0


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a reply ends. `decode` is needed for stop strings only."""

    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    def reason(self, tokens: Sequence[int], limit: int, window: StopWindow) -> str | None:
        """Why a reply ends with the last of its tokens; None where it does not. Asked after every token."""
        if tokens[-1] in self.stop_ids or (self.stop_strings and self._stop_string_in(tokens, window)):
            return "stop"
        return "length" if len(tokens) >= limit else None

    def _stop_string_in(self, tokens: Sequence[int], window: StopWindow) -> bool:
        text = self.decode(list(tokens[window.start :]))
        if any(stop in text for stop in self.stop_strings):
            return True
        kept = max(map(len, self.stop_strings)) + MARGIN
        if len(text) >= 2 * kept:
            self._move(window, tokens, text, kept)
        return False

    def _move(self, window: StopWindow, tokens: Sequence[int], text: str, kept: int) -> None:
        """Leave out the older half of the window, unless its newer half is too short or alone says something else."""
        middle = (window.start + len(tokens)) // 2
        rest = self.decode(list(tokens[middle:]))
        # Bytes that are no characters say nothing about where characters begin, however alike the two texts are.
        if len(rest) >= kept and REPLACEMENT not in rest and text.endswith(rest):
            window.start = middle
