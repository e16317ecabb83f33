"""Prompt files, and prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError
from blockdraft.records import read_json_lines

Conversation = list[dict[str, str]]


def prompt_lines(conversations: Sequence[Conversation]) -> str:
    """Conversations as JSON lines with one key, `messages`."""
    return "".join(json.dumps({"messages": conversation}, ensure_ascii=False) + "\n" for conversation in conversations)


def read_prompts(path: Path, field: str) -> list[Conversation]:
    """Read a prompt file: each line an object with `messages` (role and content) or a string `prompt`.

    A reply at the end of `messages` is dropped, since the verifier's own takes its place.
    """
    conversations = []
    for number, row in read_json_lines(path, field):
        where = f"{path} line {number}"
        if not isinstance(row, dict):
            raise InputError(field, where, "each line must be an object with `messages` or `prompt`")
        messages = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row.get("messages")
        conversations.append(_checked(messages, field, where))
    if not conversations:
        raise InputError(field, path, "no prompts in it")
    return conversations


def _checked(messages: Any, field: str, where: str) -> Conversation:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InputError(field, where, "`messages` must be a list of objects with role and content")
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InputError(field, where, "no message to reply to")
    for message in messages:
        content = message.get("content")
        if message.get("role") not in ("system", "user", "assistant"):
            raise InputError(field, where, f"unknown role {message.get('role')!r}: use system, user or assistant")
        if not isinstance(content, str) or not content.strip():
            raise InputError(field, where, f"the content of a {message['role']} turn is not a text or empty")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def encode_prompt(tokenizer: Any, conversation: Conversation) -> list[int]:
    """Token ids of a conversation up to where the reply starts, by the verifier's own chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        if len(conversation) > 1:
            raise InputError("verifier", "no chat template", "it can continue single prompts only, not conversations")
        return list(tokenizer(conversation[0]["content"])["input_ids"])
    encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
