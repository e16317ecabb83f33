"""Replies as they are written, kept in an SQLite file one by one, so that a kill at any moment loses none of them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import InputError
from blockdraft.files import writing

# With a write-ahead log, a commit is one flush. Exclusive locking needs no shared memory, which network disks lack.
_PRAGMAS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL")
_TABLE = "replies (id TEXT, turn INTEGER, tokens TEXT, rejected TEXT, PRIMARY KEY (id, turn)) WITHOUT ROWID"


@dataclass(frozen=True, slots=True)
class Written:
    """A reply.

    Attributes:
        id: of the conversation.
        turn: index of the reply among its turns.
        tokens: token ids, the token that ends the turn included if it came.
        rejected: why there is no reply, in the words of whoever rejected; the conversation is left out.
    """

    id: str
    turn: int
    tokens: list[int]
    rejected: str | None = None


class Journal:
    """Replies by conversation and turn; what an earlier run wrote into the file is there from the start.

    Raises:
        InputError: the file is damaged.
        BlockdraftError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._guarded():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path)
            try:
                self._open()
            except BaseException:
                self.close()
                raise

    def _open(self) -> None:
        for pragma in _PRAGMAS:
            self._database.execute(f"PRAGMA {pragma}")
        ((state,),) = self._database.execute("PRAGMA quick_check(1)")
        if state != "ok":
            raise sqlite3.DatabaseError(state.splitlines()[-1])
        with self._database:
            self._database.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with writing(self._path, sqlite3.OperationalError):
                yield
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise InputError(
                "--save-path",
                self._path,
                f"the replies of an unfinished run are damaged ({error}); delete this file to have them written anew",
            ) from None

    def get(self, id: str, turn: int) -> Written | None:
        """The reply, if it was written."""
        with self._guarded():
            found = self._database.execute("SELECT tokens, rejected FROM replies WHERE id = ? AND turn = ?", (id, turn))
            row = found.fetchone()
            return None if row is None else Written(id, turn, json.loads(row[0]), row[1])

    def __len__(self) -> int:
        with self._guarded():
            return int(self._database.execute("SELECT count(*) FROM replies").fetchone()[0])

    def add(self, replies: Iterable[Written]) -> None:
        """Keep replies; when this returns they are on disk."""
        rows = [(reply.id, reply.turn, json.dumps(reply.tokens), reply.rejected) for reply in replies]
        with self._guarded(), self._database:
            self._database.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        """Let go of the file; what is in it stays."""
        self._database.close()
