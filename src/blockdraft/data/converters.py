"""From a row of any of the usual shapes to a conversation, or to token ids that are ready.

The shape is found by the row's columns; a converter can be named instead. `ask:reply` (two columns with a colon
between them) is a converter too.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.data.conversations import Conversation, Messages, RowError, checked, first_of, pair, plain
from blockdraft.records import Span

Row = Mapping[str, Any]

_MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog")
_PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt-response": (("prompt", "query"), ("response", "completion", "chosen", "reply")),
    "question-answer": (("question", "problem"), ("answer", "solution")),  # GSM8K, MATH
    "text-code": (("text", "prompt"), ("code", "canonical_solution")),  # MBPP, HumanEval
    "source-target": (
        ("source", "src", "mr", "document", "article", "input"),
        ("target", "tgt", "ref", "summary", "highlights", "output"),
    ),  # translation, E2E, summaries; two columns without a header
    "prompt": (("prompt", "question", "problem", "text"), ()),
}
_SYSTEM = ("system", "system_prompt")
_TURN_MARK = re.compile(r"(?:^|\s)### (Human|Assistant):\s?")  # text with marks, as OASST1 was spread for QLoRA


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row whose token ids are made already."""

    input_ids: list[int]
    targets: tuple[Span, ...]
    source_ids: list[int] | None
    id: str | None = None


def convert(row: Any, converter: str | None = None, rewrite: bool = False) -> Conversation | Tokens:
    """Make a conversation of a row.

    Args:
        converter: its name; default: found by the row's columns.
        rewrite: the verifier will write the replies (`conversations.checked`).

    Raises:
        RowError: the shape is not known, or the content cannot be used.
    """
    if not isinstance(row, Mapping):
        raise RowError("not an object", type(row).__name__)
    row = {column: value for column, value in row.items() if value is not None}
    name = converter or shape_of(row)
    own = row.get("id")
    identity = str(plain(own)) if isinstance(own, str | int) and not isinstance(own, bool) else None
    if name == "tokens":
        return _tokens(row, identity)
    return Conversation(checked(_raw(row, name), rewrite), _tools(row) or None, identity)


def names() -> tuple[str, ...]:
    """The names that `convert` takes, besides `column:column`."""
    return (*_SHAPES, "tokens")


def is_converter(name: str) -> bool:
    """Whether `convert` takes this name."""
    return name in names() or re.fullmatch(r"[^:]+:[^:]+", name) is not None


def shape_of(row: Row) -> str:
    """The first converter that fits the row's columns."""
    if "input_ids" in row:
        return "tokens"
    found = next((name for name, shape in _SHAPES.items() if shape.fits(row)), None)
    if found is None:
        raise RowError("unknown shape", f"columns {', '.join(map(str, row)) or 'none'}"[:120])
    return found


def _raw(row: Row, name: str) -> Any:
    if ":" in name:
        asked, reply = name.split(":")
        for column in (asked, reply):
            if column not in row:
                raise RowError("missing column", column)
        return pair(row[asked], row[reply], _system(row))
    try:
        return _SHAPES[name].convert(row)
    except KeyError as error:  # a converter that was named, for a row without its columns
        raise RowError("missing column", str(error.args[0])[:60]) from None


def _tools(row: Row) -> list[Any]:
    """The tools a row offers: a list, or a list written as JSON text, as tables have it."""
    tools = row.get("tools", [])
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError):
            raise RowError("tools are not a list", "a text that is no JSON") from None
    if not isinstance(tools, list):
        raise RowError("tools are not a list", type(tools).__name__)
    return list(plain(tools))


def _list(row: Row, column: str) -> list[Any]:
    if not isinstance(row[column], list):
        raise RowError(f"{column} is not a list", type(row[column]).__name__)
    return list(row[column])


@dataclass(frozen=True, slots=True)
class _Shape:
    fits: Callable[[Row], bool]
    convert: Callable[[Row], Any]


def _messages(row: Row) -> Any:
    raw = first_of(row, _MESSAGES)
    system = _system(row)
    opens = isinstance(raw, list) and bool(raw) and isinstance(raw[0], dict)
    has_one = opens and "system" in (raw[0].get("role"), raw[0].get("from"))
    return [{"role": "system", "content": system}, *raw] if system and opens and not has_one else raw


def _prompt_completion(row: Row) -> Any:
    replies = row["completion"] if isinstance(row.get("completion"), list) else []
    return [*_list(row, "prompt"), *replies]


def _turns(row: Row) -> Messages:
    """Questions whose replies are to be written (MT-Bench, Spec-Bench)."""
    raw: Messages = []
    for turn in _list(row, "turns"):
        raw += [{"role": "user", "content": turn}, {"role": "assistant", "content": None}]
    return raw[:-1] if raw else raw


def _instruction(row: Row) -> Messages:
    text, extra = row["instruction"], row.get("input")
    if isinstance(text, str) and isinstance(extra, str) and extra.strip():
        text = f"{text}\n\n{extra}"
    return pair(text, first_of(row, ("output", "response", "completion", "answer")), _system(row))


def _instances(row: Row) -> Messages:
    first = row["instances"][0] if isinstance(row["instances"], list) and row["instances"] else None
    if not isinstance(first, Mapping):
        raise RowError("no instance")
    return _instruction({"instruction": row["instruction"], **{k: v for k, v in first.items() if v is not None}})


def _marked_text(row: Row) -> Messages:
    asked, reply = (row["input"], row.get("output", "")) if "input" in row else (row["text"], "")
    if not isinstance(asked, str) or not isinstance(reply, str):
        raise RowError("content is not text", f"{type(asked).__name__} and {type(reply).__name__}")
    text = f"{asked} {reply}" if "input" in row else asked
    parts = _TURN_MARK.split(text)[1:]
    turns = [
        {"role": role.lower(), "content": part.strip()} for role, part in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[:-1] if turns and turns[-1] == {"role": "assistant", "content": ""} else turns


def _is_marked(row: Row) -> bool:
    text = row.get("input", row.get("text"))
    return isinstance(text, str) and text.startswith("### Human:")


def _pair_shape(name: str) -> _Shape:
    asked, replies = _PAIRS[name]

    def fits(row: Row) -> bool:
        return any(c in row for c in asked) and (not replies or any(c in row for c in replies))

    return _Shape(fits, lambda row: pair(first_of(row, asked), first_of(row, replies), _system(row)))


def _system(row: Row) -> Any:
    return next((row[column] for column in _SYSTEM if row.get(column)), None)


_SHAPES: dict[str, _Shape] = {
    "messages": _Shape(lambda row: any(column in row for column in _MESSAGES), _messages),
    "prompt-completion": _Shape(lambda row: isinstance(row.get("prompt"), list), _prompt_completion),
    "turns": _Shape(lambda row: isinstance(row.get("turns"), list), _turns),
    "instances": _Shape(lambda row: "instruction" in row and "instances" in row, _instances),
    "instruction": _Shape(lambda row: "instruction" in row, _instruction),
    "human-assistant": _Shape(_is_marked, _marked_text),
    **{name: _pair_shape(name) for name in _PAIRS},
}


def _tokens(row: Row, identity: str | None) -> Tokens:
    """Ids with the supervised ones marked by `targets` (spans), `loss_mask` or `labels` (-100: not supervised)."""
    ids = _ids(row.get("input_ids"), "input_ids")
    own = [column for column in ("source_ids", "encoder_input_ids") if column in row]
    source_ids = _ids(row[own[0]], own[0]) if own else None
    if "targets" in row:
        targets = _spans(row["targets"], len(ids))
    elif "loss_mask" in row or "labels" in row:
        marks = row.get("loss_mask", row.get("labels"))
        if isinstance(marks, list) and "loss_mask" not in row:
            marks = [label != -100 for label in marks]
        if not isinstance(marks, list) or len(marks) != len(ids):
            raise RowError("loss mask of another length", f"{len(ids)} ids")
        targets = _runs([bool(mark) and index > 0 for index, mark in enumerate(marks)])
    else:
        raise RowError("tokens without targets", "needs targets, loss_mask or labels")
    if not targets:
        raise RowError("nothing to learn")
    return Tokens(ids, targets, source_ids, identity)


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise RowError("not token ids", name)
    return value


def _spans(value: Any, length: int) -> tuple[Span, ...]:
    """Spans [start, end) in ascending order; the first token of a text has nothing before it to be predicted from."""
    if not isinstance(value, list) or not all(isinstance(span, list) and len(span) == 2 for span in value):
        raise RowError("targets are not spans", str(value)[:60])
    bounds = [bound for span in value for bound in span]
    if not all(type(bound) is int for bound in bounds):
        raise RowError("targets are not spans", str(value)[:60])
    rising = all(a < b if i % 2 == 0 else a <= b for i, (a, b) in enumerate(itertools.pairwise(bounds)))
    if bounds and (not rising or bounds[0] < 1 or bounds[-1] > length):
        raise RowError("targets outside of the text", f"{str(value)[:60]} of {length} tokens")
    return tuple((start, end) for start, end in value)


def _runs(marks: list[bool]) -> tuple[Span, ...]:
    spans, start = [], None
    for index, mark in enumerate([*marks, False]):
        if mark and start is None:
            start = index
        elif not mark and start is not None:
            spans.append((start, index))
            start = None
    return tuple(spans)
