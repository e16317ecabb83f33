"""The records that pass between stages: examples (texts of the verifier as token ids)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blockdraft.errors import InputError

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """A text of the verifier with the parts of it that are supervised: its replies.

    Attributes:
        id: where it came from, unique in its file.
        input_ids: the whole text, without padding; the decoder's side where the verifier has an encoder.
        targets: half-open spans of `input_ids` that are supervised, ascending and apart; each is a reply or a part of one.
        finish: how the last reply ended: "stop" or "length".
        source_ids: what the verifier's encoder reads; None where it has none.
        key: digest of the request that the text answers; decides whether it trains or validates.
    """

    id: str
    input_ids: list[int]
    targets: tuple[Span, ...]
    finish: str
    source_ids: list[int] | None = None
    key: str = ""

    def __post_init__(self) -> None:
        behind = 1  # the first token of a text is never supervised: nothing predicts it
        for start, end in self.targets:
            if not behind <= start < end:
                break
            behind = end + 1
        else:
            if self.targets and behind - 1 <= len(self.input_ids):
                return
        raise InputError(
            f"example {self.id}",
            f"targets {list(self.targets)} of {len(self.input_ids)} tokens",
            "needs spans of learned tokens, ascending, apart, within the text and behind its first token",
        )

    @classmethod
    def of_reply(cls, id: str, prompt: list[int], reply: list[int], finish: str, **more: Any) -> Example:
        """A prompt and the one reply to it."""
        return cls(id, prompt + reply, ((len(prompt), len(prompt) + len(reply)),), finish, **more)

    @property
    def first_target(self) -> int:
        """Index of the first supervised token."""
        return self.targets[0][0]

    @property
    def supervised(self) -> list[int]:
        """The supervised tokens of all spans, one after the other."""
        return [token for start, end in self.targets for token in self.input_ids[start:end]]


def examples_digest(examples: Iterable[Example]) -> str:
    """64 hex digits of SHA-256 over what examples say and what of it is supervised."""
    total = hashlib.sha256()
    for example in examples:
        for part in (
            example.input_ids,
            example.source_ids or [],
            [bound for span in example.targets for bound in span],
        ):
            total.update(len(part).to_bytes(8, "big") + array("q", part).tobytes())
    return total.hexdigest()
