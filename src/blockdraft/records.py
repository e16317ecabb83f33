"""The records that pass between stages: documents (prompt and the verifier's reply as token ids) as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and a reply.

    Attributes:
        id: where it came from, unique in its file.
        input_ids: prompt and reply, without padding.
        reply_start: index of the reply's first token.
        finish: how the reply ended: "stop" or "length".
    """

    id: str
    input_ids: list[int]
    reply_start: int
    finish: str

    def __post_init__(self) -> None:
        if not 0 < self.reply_start < len(self.input_ids):
            raise InputError(
                f"document {self.id}",
                f"reply_start {self.reply_start} of {len(self.input_ids)} tokens",
                "a document needs at least one prompt token and one reply token",
            )

    @property
    def prompt(self) -> list[int]:
        return self.input_ids[: self.reply_start]

    @property
    def reply(self) -> list[int]:
        return self.input_ids[self.reply_start :]


def read_json_lines(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """Line number and value of every line that is not blank; broken lines are named."""
    try:
        handle = path.open(encoding="utf-8")
    except OSError as error:
        raise InputError(field, path, f"cannot be opened ({error.strerror})") from None
    with handle:
        try:
            for number, line in enumerate(handle, start=1):
                if line.strip():
                    yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(field, f"{path} line {number}", f"not valid JSON ({error.msg})") from None
        except UnicodeDecodeError:
            raise InputError(field, path, "not UTF-8 text") from None


def read_documents(path: Path, field: str) -> list[Document]:
    """Read documents; an empty file or a row of another shape is refused."""
    documents = []
    for number, row in read_json_lines(path, field):
        try:
            documents.append(Document(row["id"], row["input_ids"], row["reply_start"], row["finish"]))
        except (KeyError, TypeError) as error:
            raise InputError(field, f"{path} line {number}", f"not a document ({error})") from None
    if not documents:
        raise InputError(field, path, "no documents in it")
    return documents


def document_lines(documents: Iterable[Document]) -> str:
    """Documents as JSON lines."""
    return "".join(json.dumps(asdict(document)) + "\n" for document in documents)
