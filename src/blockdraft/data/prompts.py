"""Prompts of a file or a data folder, for the commands that decode; and prompts as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockdraft.data.conversations import Conversation, Messages, RowError, request
from blockdraft.data.converters import convert
from blockdraft.data.mixture import place
from blockdraft.data.readers import read_rows
from blockdraft.data.record import TABLE, read_record
from blockdraft.data.sources import Source
from blockdraft.data.templates import ChatMode, ChatTemplate
from blockdraft.errors import InputError
from blockdraft.extras import require


def read_prompts(path: Path, field: str) -> list[Messages]:
    """What to reply to: a file in any form that `prepare` reads, or the validation texts of a data folder.

    Of a conversation with several replies the last one is asked for, after those before it; where these are still to be
    written, as in lists of questions, the first one.

    Raises:
        InputError: nothing there, or a row that cannot be used; it is named.
    """
    if (path / TABLE).is_file():
        return _held_out(path, field)
    if not path.exists():
        raise InputError(field, path, "no such file")
    prompts = []
    for line, row in read_rows(Source("prompts", str(path))):
        try:
            prompts.append(_prompt_of(row))
        except RowError as error:
            raise InputError(field, f"{path} line {line}", str(error)) from None
    if not prompts:
        raise InputError(field, path, "no prompts in it")
    return prompts


def _prompt_of(row: Any) -> Messages:
    if isinstance(row, RowError):
        raise row
    item = convert(row, rewrite=True)
    if not isinstance(item, Conversation):
        raise RowError("token ids without a conversation")
    try:
        whole = convert(row)
    except RowError:
        return request(item.messages)
    assert isinstance(whole, Conversation)
    return whole.messages[:-1] if whole.messages[-1]["role"] == "assistant" else whole.messages


def _held_out(folder: Path, field: str) -> list[Messages]:
    """The first request of every conversation that validates."""
    require("pyarrow")
    from blockdraft.data.table import read_table

    ratio = read_record(folder, field)["facts"]["train_data_ratio"]
    rows = read_table(folder, field).select(["key", "conversation"]).to_pylist()
    texts = [row["conversation"] for row in rows if row["conversation"] is not None and place(row["key"]) >= ratio]
    if not texts:
        raise InputError(field, folder, "none of its texts validates; prepare it with a smaller --train-data-ratio")
    return [request(Conversation.from_json(text).messages) for text in texts]


def encode_prompt(tokenizer: Any, messages: Messages, mode: ChatMode | None = None) -> list[int]:
    """Token ids of a conversation up to where the reply starts, by the verifier's own chat template."""
    try:
        return ChatTemplate(tokenizer, frozenset(), mode=mode or ChatMode()).prompt_ids(messages)
    except RowError as error:
        raise InputError("verifier", error.reason, error.detail) from None
