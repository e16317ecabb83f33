"""What a conversation is, and what is wrong with a row that is none."""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

# The spellings of the public data sets: ShareGPT, OASST1, Vicuna, OpenAI.
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "value", "text")
_KEPT_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # what chat templates may read besides


class RowError(Exception):
    """A row that cannot be used.

    Attributes:
        reason: the kind of fault, by which rows are counted.
        detail: what was found in this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        # Details quote rows, which may hold what cannot be written to a file.
        detail = detail.encode("utf-8", "backslashreplace").decode()
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason} ({detail})" if detail else reason)


def plain(value: Any, depth: int = 0) -> Any:
    """A row's value as JSON has it, without the nulls that mixtures of unlike rows are padded with.

    Raises:
        RowError: something that JSON cannot hold, a text that is not valid Unicode, or nesting without end.
    """
    if depth > _DEEPEST:
        raise RowError("nested too deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError("not valid Unicode text", f"character {error.start}") from None
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(each, depth + 1) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise RowError("a value that JSON cannot hold", type(value).__name__)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise RowError("a value that JSON cannot hold", f"key of type {type(key).__name__}")
    plain(key)
    return key


_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, the tools that the assistant may call, and the row's own id if it has one.

    A turn is a dict with `role` and `content`. A turn of the assistant is a reply to learn unless it carries
    `"weight": 0`; its content is None where `regenerate` is to write it.
    """

    messages: Messages
    tools: list[Any] | None = None
    id: str | None = None

    def to_json(self) -> str:
        """Messages and tools as one line of JSON, the same for the same conversation."""
        facts = {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        return json.dumps(facts, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        facts = json.loads(text)
        return cls(facts["messages"], facts.get("tools"))


def reply_turns(messages: Messages) -> list[int]:
    """Indices of the replies to learn."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant" and turn.get("weight", 1)]


def checked(raw: Any, rewrite: bool = False) -> Messages:
    """Turns in one spelling.

    Args:
        raw: a list of turns in any of the known spellings.
        rewrite: the verifier will write the replies; those that are there need not be usable and are emptied, and a
            conversation that ends with a question gets an empty reply.

    Raises:
        RowError: not a conversation that starts with a question.
    """
    if not isinstance(raw, list):
        raise RowError("messages are not a list", type(raw).__name__)
    if not raw:
        raise RowError("no messages")
    messages = [_turn(plain(turn), rewrite) for turn in raw]
    spoken = [turn["role"] for turn in messages if turn["role"] != "system"]
    if "user" not in spoken:
        raise RowError("no user turn")
    if spoken[0] != "user":
        raise RowError("does not start with the user", f"starts with {spoken[0]}")
    if rewrite and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages


def _turn(raw: Any, rewrite: bool) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RowError("a message is not an object", type(raw).__name__)
    spelling = next((raw[key] for key in _ROLE_KEYS if key in raw), None)
    role = _ROLES.get(spelling.lower()) if isinstance(spelling, str) else None
    if role is None:
        raise RowError("unknown role", repr(spelling)[:60])
    turn = {"role": role, **{key: raw[key] for key in _KEPT_KEYS if raw.get(key) is not None}}
    if role == "assistant" and (raw.get("weight") == 0 or raw.get("train") is False):
        turn["weight"] = 0
    calls = role == "assistant" and bool(turn.get("tool_calls"))
    if rewrite and role == "assistant" and "weight" not in turn:
        if not calls:
            return {"role": role, "content": None}
        turn["weight"] = 0  # the tool's answer that follows belongs to this very call
    content = next((raw[key] for key in _CONTENT_KEYS if key in raw), None)
    turn["content"] = _text(content, role, may_be_empty=calls)
    return turn


def _text(content: Any, role: str, may_be_empty: bool) -> str:
    if isinstance(content, list):
        parts = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
        if any(part != "text" for part in parts):
            raise RowError("content is not text", f"{role}: parts {sorted({str(part) for part in parts})}")
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RowError("content is not text", f"{role}: a text part without text")
        content = "".join(texts)
    if content is None:
        if may_be_empty:
            return ""
        raise RowError("null content", role)
    if not isinstance(content, str):
        raise RowError("content is not text", f"{role}: {type(content).__name__}")
    if not content.strip() and not may_be_empty:
        raise RowError("empty content", role)
    return content


def pair(prompt: Any, reply: Any, system: Any = None) -> Messages:
    """A question and its reply as raw turns; no reply where it is missing."""
    turns = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    turns.append({"role": "user", "content": prompt})
    return turns if reply is _MISSING else [*turns, {"role": "assistant", "content": reply}]


_MISSING: Any = object()


def first_of(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    """The value of the first column that the row has; else what `pair` takes for no reply."""
    return next((row[column] for column in columns if column in row), _MISSING)


def request(messages: Messages) -> Messages:
    """The turns before the first reply to learn: what is asked."""
    replies = reply_turns(messages)
    return messages[: replies[0]] if replies else messages


def questions(messages: Messages) -> set[str]:
    """The user's last words before each reply to learn, in a spelling for comparison (case, width and spaces aside)."""
    found = set()
    for index in reply_turns(messages) or [len(messages)]:
        asked = next((turn["content"] for turn in reversed(messages[:index]) if turn["role"] == "user"), "")
        found.add(" ".join(unicodedata.normalize("NFKC", asked).casefold().split()))
    return found


def content_digest(value: Any) -> str:
    """32 hex digits of SHA-256 over JSON-ready content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:32]
