"""Replies as they are written, kept on disk one by one, so that a kill at any moment loses none of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from blockdraft.files import write_text


@dataclass(frozen=True, slots=True)
class Written:
    """A reply.

    Attributes:
        id: of the conversation.
        turn: index of the reply among its turns.
        tokens: token ids, the token that ends the turn included if it came.
        refused: why there is no reply, in the words of whoever refused; the conversation is left out.
    """

    id: str
    turn: int
    tokens: list[int]
    refused: str | None = None


class Journal:
    """Replies by conversation and turn; what an earlier run wrote into the file is there from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._replies: dict[tuple[str, int], Written] = {}
        if path.is_file():
            self._take_up()
        path.parent.mkdir(parents=True, exist_ok=True)

    def _take_up(self) -> None:
        text = self._path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a line that the kill cut short
            write_text(self._path, whole)
        for line in whole.split("\n")[:-1]:
            reply = Written(**json.loads(line))
            self._replies[reply.id, reply.turn] = reply

    def get(self, id: str, turn: int) -> Written | None:
        """The reply, if it was written."""
        return self._replies.get((id, turn))

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, replies: Iterable[Written]) -> None:
        """Keep replies; when this returns they are on disk."""
        fresh = list(replies)
        with self._path.open("a", encoding="utf-8") as handle:
            handle.writelines(json.dumps(asdict(reply), ensure_ascii=False) + "\n" for reply in fresh)
            handle.flush()
            os.fsync(handle.fileno())
        self._replies.update({(reply.id, reply.turn): reply for reply in fresh})
