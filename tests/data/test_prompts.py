"""Prompt files and the shipped workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockdraft.data.prompts import encode_prompt, read_prompts
from blockdraft.data.workloads import WORKLOADS, workload_prompts
from blockdraft.errors import InputError
from conftest import tiny_tokenizer


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads_are_fixed_and_their_parts_disjoint(workload: str) -> None:
    train, heldout = workload_prompts(workload)
    assert (train, heldout) == workload_prompts(workload)
    assert len(train) >= 200 and len(heldout) >= 20
    last = [c[-1]["content"] for c in train]
    assert len(set(last)) == len(last)
    assert not set(last) & {c[-1]["content"] for c in heldout}
    assert all(c[-1]["role"] == "user" for c in train + heldout)


def test_heldout_records_have_names_and_patterns_that_no_training_record_has() -> None:
    from blockdraft.data.workloads import records

    for key in ("first", "last"):
        assert not set(records._HELDOUT[key]) & set(records._TRAIN[key])
    assert not set(records._HELDOUT_PATTERNS) & set(records._TRAIN_PATTERNS)


def test_round_trip_and_reply_dropped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    conversation = [{"role": "user", "content": "w1 w2 é"}]
    path.write_text(json.dumps({"messages": conversation}) + "\n" + json.dumps({"prompt": "w3"}) + "\n\n")
    assert read_prompts(path, "--data-path") == [conversation, [{"role": "user", "content": "w3"}]]
    path.write_text(json.dumps({"messages": [*conversation, {"role": "assistant", "content": "old"}]}))
    assert read_prompts(path, "--data-path") == [conversation]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no prompts"),
        ("{", "line 1"),
        ("[1]", "line 1: not an object"),
        ('{"messages": []}', "no message"),
        ('{"messages": [{"role": "robot_x", "content": "a"}]}', "robot_x"),
        ('{"messages": [{"role": "user", "content": null}]}', "null content"),
        ('{"messages": [{"role": "user", "content": "  "}]}', "empty content"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "not text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        ('{"other": 1}', "unknown shape"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match=says):
        read_prompts(path, "--data-path")


def test_several_replies_and_lists_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"turns": ["x", "y"]}))
    assert read_prompts(path, "--data-path") == [talk, [{"role": "user", "content": "x"}]]


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="UTF-8"):
        read_prompts(tmp_path / "p.jsonl", "--data-path")
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl", "--data-path")


def test_encoding_ends_where_the_reply_starts() -> None:
    ids = encode_prompt(tiny_tokenizer(), [{"role": "user", "content": "w1 w2"}])
    assert ids[-1] == 96 and ids[1:3] == [4, 5]
