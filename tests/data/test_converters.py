"""Rows of every usual shape become conversations; every kind of bad row is named."""

from __future__ import annotations

from typing import Any

import pytest

from blockdraft.data.conversations import Conversation, RowError, questions, reply_turns, request
from blockdraft.data.converters import Tokens, convert, is_converter, names, shape_of

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def turns(row: dict[str, Any], **options: Any) -> list[tuple[str, str | None]]:
    found = convert(row, **options)
    assert isinstance(found, Conversation)
    return [(turn["role"], turn["content"]) for turn in found.messages]


PAIR = [("user", "q"), ("assistant", "a")]
SHAPES = [
    ("messages", {"messages": [U, A]}, PAIR),
    ("messages", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, PAIR),
    ("messages", {"conversation": [{"role": "prompter", "text": "q"}, {"role": "assistant", "text": "a"}]}, PAIR),
    ("messages", {"system": "s", "messages": [U, A]}, [("system", "s"), *PAIR]),
    ("messages", {"system": "s", "messages": [{"role": "system", "content": "own"}, U, A]}, [("system", "own"), *PAIR]),
    ("prompt-completion", {"prompt": [U], "completion": [A]}, PAIR),
    ("prompt-response", {"prompt": "q", "response": "a"}, PAIR),
    ("prompt-response", {"prompt": "q", "completion": "a", "system_prompt": "s"}, [("system", "s"), *PAIR]),
    ("instruction", {"instruction": "q", "input": "", "output": "a"}, PAIR),
    (
        "instruction",
        {"instruction": "q", "input": "more", "response": "a"},
        [("user", "q\n\nmore"), ("assistant", "a")],
    ),
    ("instances", {"instruction": "q", "instances": [{"input": "", "output": "a"}]}, PAIR),
    ("question-answer", {"question": "q", "answer": "a"}, PAIR),
    ("question-answer", {"problem": "q", "solution": "a"}, PAIR),
    ("text-code", {"text": "q", "code": "a", "test_list": []}, PAIR),
    ("text-code", {"prompt": "q", "canonical_solution": "a", "task_id": "x"}, PAIR),
    ("source-target", {"mr": "q", "ref": "a"}, PAIR),
    ("source-target", {"source": "q", "target": "a"}, PAIR),
    ("human-assistant", {"input": "### Human: q ### Assistant:", "output": "a"}, PAIR),
    (
        "human-assistant",
        {"text": "### Human: q\n### Assistant: a\n### Human: q2\n### Assistant: b ### not a mark"},
        [*PAIR, ("user", "q2"), ("assistant", "b ### not a mark")],
    ),
    ("prompt", {"prompt": "q"}, [("user", "q")]),
    ("prompt", {"text": "q"}, [("user", "q")]),
]


@pytest.mark.parametrize(("name", "row", "wanted"), SHAPES)
def test_shapes_are_found_and_read(name: str, row: dict[str, Any], wanted: list) -> None:
    assert shape_of(row) == name
    assert turns(row) == wanted == turns(row, converter=name)


def test_a_converter_can_be_named_against_the_shape() -> None:
    row = {"prompt": "p", "response": "r", "ask": "q", "reply": "a"}
    assert turns(row, converter="ask:reply") == PAIR
    with pytest.raises(RowError, match="missing column"):
        convert(row, "ask:nothing")
    assert all(is_converter(name) for name in (*names(), "x:y")) and not is_converter("nothing")


def test_replies_that_the_verifier_will_write_are_emptied_and_the_last_one_is_added() -> None:
    assert turns({"messages": [U, A, U]}, rewrite=True) == [
        ("user", "q"), ("assistant", None), ("user", "q"), ("assistant", None)
    ]  # fmt: skip
    assert turns({"turns": ["q", "q2"]}, rewrite=True)[1::2] == [("assistant", None)] * 2
    assert turns({"question": "q", "answer": None}, rewrite=True) == [("user", "q"), ("assistant", None)]


def test_turns_with_weight_0_and_tool_calls_stay_as_they_are() -> None:
    shown = {**A, "weight": 0}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = {"messages": [U, shown, U, call, {"role": "tool", "content": "42"}, A], "tools": [{"name": "f"}]}
    kept, emptied = convert(row), convert(row, rewrite=True)
    assert isinstance(kept, Conversation) and isinstance(emptied, Conversation)
    assert reply_turns(kept.messages) == [3, 5] and reply_turns(emptied.messages) == [5]
    assert emptied.messages[1]["content"] == "a" and emptied.messages[3]["tool_calls"] and kept.tools == [{"name": "f"}]
    assert request(emptied.messages) == emptied.messages[:5]
    assert Conversation.from_json(kept.to_json()) == kept


def message(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}, A]}


BAD = [
    ({"messages": []}, "no messages"),
    ({"messages": "hello"}, "messages are not a list"),
    ({"messages": ["hello"]}, "a message is not an object"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
    ({"messages": [A, U]}, "does not start with the user"),
    ({"messages": [U, {"role": "robot_x", "content": "a"}]}, "unknown role"),
    ({"messages": [U, {"content": "a"}]}, "unknown role"),
    (message("user", ""), "empty content"),
    (message("user", " \n"), "empty content"),
    (message("user", None), "null content"),
    (message("user", 7), "content is not text"),
    (message("user", [{"type": "image_url", "image_url": "x"}]), "content is not text"),
    ({"messages": [U, {"role": "assistant", "content": None}]}, "null content"),
    ({"question": "q", "answer": ""}, "empty content"),
    ({"instruction": "q", "instances": []}, "no instance"),
    ({"a": 1, "b": 2}, "unknown shape"),
    ({}, "unknown shape"),
    ([1, 2], "not an object"),
    (None, "not an object"),
    ({"messages": [U, A], "tools": "f"}, "tools are not a list"),
    ({"input_ids": [1, 2, 3]}, "tokens without targets"),
    ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "not token ids"),
    ({"input_ids": [], "loss_mask": []}, "not token ids"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss mask of another length"),
    ({"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}, "nothing to learn"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_every_kind_of_bad_row_has_its_reason(row: Any, reason: str) -> None:
    with pytest.raises(RowError) as found:
        convert(row)
    assert found.value.reason == reason


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]
    assert turns(message("user", parts))[0] == ("user", "q!")


def test_rows_of_token_ids() -> None:
    mask = convert({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [1, 0, 1, 1, 0], "id": 3})
    labels = convert({"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100], "encoder_input_ids": [4]})
    assert mask == Tokens([5, 6, 7, 8, 9], ((2, 4),), None, "3")
    assert labels == Tokens([5, 6, 7, 8, 9], ((2, 4),), [4], None)


def test_questions_are_compared_without_case_width_and_spaces() -> None:
    one = [{"role": "user", "content": "What  IS\nthis？"}, A]
    shown = [{"role": "user", "content": "example"}, {**A, "weight": 0}, {"role": "user", "content": "what is this?"}]
    assert questions(one) == questions([*shown, A]) == questions(shown) == {"what is this?"}
