"""Any row gives an example or a reason, any file rows or one line; never an exception of another kind."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data.candidates import Rejects, collect
from blockdraft.data.conversations import Conversation, RowError
from blockdraft.data.converters import Tokens, convert, names
from blockdraft.data.encoding import Encoder
from blockdraft.data.journal import Journal, Written
from blockdraft.data.mixture import wanted_counts
from blockdraft.data.readers import read_rows
from blockdraft.data.sources import Source
from blockdraft.data.templates import ChatTemplate
from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.vllm_plugin import record
from conftest import tiny_tokenizer
from data.odd_rows import EXAMPLES, TEXTS, VALUES, rows

fuzz = settings(max_examples=EXAMPLES, derandomize=True, deadline=None)


def made(row: Any, converter: str | None = None, rewrite: bool = False) -> Conversation | Tokens | str:
    try:
        return convert(row, converter, rewrite)
    except RowError as error:
        return error.reason


@fuzz
@given(row=rows(), converter=st.none() | st.sampled_from([*names(), "question:answer"]), rewrite=st.booleans())
def test_any_row_is_an_example_or_a_reason(row: Any, converter: str | None, rewrite: bool) -> None:
    found = made(row, converter, rewrite)
    if isinstance(found, Conversation):
        again = Conversation.from_json(found.to_json())
        assert again.messages == found.messages
        found.to_json().encode()
        for turn in found.messages:
            assert turn["content"] is None or isinstance(turn["content"], str)
    elif isinstance(found, Tokens):
        # What the trainer asks of an example, which it makes of these ids.
        Example("x", found.input_ids, found.targets, found.source_ids)
        json.dumps(found.input_ids)
        assert all(1 <= a < b <= len(found.input_ids) for a, b in found.targets)
        assert all(a[1] <= b[0] for a, b in zip(found.targets, found.targets[1:], strict=False))
    else:
        assert found.isprintable()


@fuzz
@given(found=st.lists(rows(), min_size=1, max_size=3))
def test_what_is_kept_is_encoded_or_has_a_reason(found: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    encoder = Encoder(ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id})), 50, 50)
    kept = [item for item in map(made, found) if not isinstance(item, str)]
    batch: dict[str, list[Any]] = {"conversation": [], "tokens": []}
    for item in kept:
        whole = isinstance(item, Conversation)
        facts = {"input_ids": None} if whole else {name: getattr(item, name) for name in
                                                   ("input_ids", "targets", "source_ids")}  # fmt: skip
        batch["conversation"].append(item.to_json() if isinstance(item, Conversation) else None)
        batch["tokens"].append(None if whole else json.dumps(facts))
    encoded = encoder(batch, list(range(len(kept))))
    for reason, ids, targets in zip(encoded["reason"], encoded["input_ids"], encoded["targets"], strict=True):
        assert reason or (targets and max(ids) < len(tokenizer) and targets[-1] <= len(ids))


@fuzz
@given(found=st.lists(rows(), max_size=4))
def test_a_source_of_odd_rows_is_counted(tmp_path_factory: pytest.TempPathFactory, found: list[Any]) -> None:
    root = tmp_path_factory.getbasetemp()
    path = root / "odd.jsonl"
    lines = [json.dumps(row, default=str, skipkeys=True) for row in found]
    path.write_text("".join(line + "\n" for line in lines))
    with (root / "rejects.jsonl").open("w", encoding="utf-8") as handle:
        rejects = Rejects(handle)
        source = Source("s", str(path))
        candidates = collect(source, root / "odd.arrow", rejects, False, frozenset(), lambda *_: None)
    assert candidates.read == len(lines) == len(candidates.contents) + sum(rejects.of(source).values())


FILES = {
    "jsonl": b'{"prompt": "a", "response": "b"}\n' * 3,
    "json": b'[{"prompt": "a", "response": "b"}]',
    "csv": b'prompt,response\na,b\n"c ""d""",e\n',
    "tsv": b"source\ttarget\na\tb\n",
    "jsonl.gz": gzip.compress(b'{"prompt": "a", "response": "b"}\n' * 30),
}


@fuzz
@given(kind=st.sampled_from([*FILES, "parquet"]), data=st.data())
def test_a_damaged_file_gives_rows_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"prompt": ["a"] * 9, "response": ["b"] * 9}), path)
    else:
        path.write_bytes(FILES[kind])
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        for _, row in read_rows(Source("s", str(path))):
            if not isinstance(row, RowError):
                made(row)
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and path.name in str(error)


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        pytest.param({"messages": None, "conversations": [{"from": "human", "value": "a"}]}, "a", id="messages"),
        pytest.param({"conversations": [{"role": None, "from": "human", "value": "a"}]}, "a", id="turn"),
        pytest.param({"prompt": None, "question": "a", "answer": "b"}, "a", id="column"),
        pytest.param({"instruction": "a", "input": None, "output": "b", "system": None}, "a", id="instruction"),
    ],
)  # fmt: skip
def test_null_is_absent(row: Any, asked: str) -> None:
    found = convert(row)
    assert isinstance(found, Conversation) and found.messages[0] == {"role": "user", "content": asked}


def test_null_beside_marks_is_absent() -> None:
    found = convert({"input_ids": [1, 2, 3], "loss_mask": None, "targets": None, "labels": [-100, 2, 3]})
    assert isinstance(found, Tokens) and found.targets == ((1, 3),)


@pytest.mark.parametrize("tools", ['[{"name": "f", "b": null}]', [{"name": "f", "b": None}]])
def test_tools_may_be_a_text_and_lose_their_nulls(tools: Any) -> None:
    found = convert({"prompt": "a", "response": "b", "tools": tools})
    assert isinstance(found, Conversation) and found.tools == [{"name": "f"}]


@pytest.mark.parametrize("targets", [[[3, 999], [1, 2]], [[1, 4], [2, 5]], [[3, 5], [1, 2]], [[0]], [[0, 2]], 7])
def test_targets_that_no_trainer_takes_are_rejected(targets: Any) -> None:
    assert isinstance(made({"input_ids": [1, 2, 3, 4, 5], "targets": targets}), str)


@pytest.mark.parametrize("value", ["\ud800", {"a": math.nan}, b"x", 2**70])
def test_what_json_cannot_hold_rejects_the_row(value: Any) -> None:
    row = {"messages": [{"role": "user", "content": "a", "tool_calls": value}, {"role": "assistant", "content": "b"}]}
    assert made(row) in ("not valid Unicode text", "a value that JSON cannot hold")
    assert isinstance(made({"prompt": "a", "response": "b", "other": value}), Conversation)  # nobody reads it


def test_a_number_of_thousands_of_digits_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": ' + "9" * 5000 + '}\n{"prompt": "a", "response": "b"}\n')
    found = [row for _, row in read_rows(Source("s", str(path)))]
    assert isinstance(found[0], RowError) and found[1] == {"prompt": "a", "response": "b"}


def test_a_bad_quote_in_a_header_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('"prompt"x,response\na,b\n')
    with pytest.raises(InputError, match="cannot be read"):
        list(read_rows(Source("s", str(path))))
    assert csv.field_size_limit() > 2**20


@fuzz
@given(id=TEXTS.filter(lambda text: "\ud800" not in text), rejected=TEXTS.filter(lambda text: "\ud800" not in text))
def test_a_journal_reads_what_it_wrote(tmp_path_factory: pytest.TempPathFactory, id: str, rejected: str) -> None:
    path = tmp_path_factory.getbasetemp() / "journal"
    path.unlink(missing_ok=True)
    replies = [Written(id, 0, [1, 2], rejected), Written(id, 1, [3])]
    with contextlib.closing(Journal(path)) as journal:
        journal.add(replies)
    with contextlib.closing(Journal(path)) as again:
        assert [again.get(id, turn) for turn in (0, 1)] == replies


def test_a_record_of_blocks_keeps_odd_names(tmp_path: Path) -> None:
    record.append(tmp_path / "r", ["a\u2028b", "c\x85d"], [1, 2], [[3], [4]])
    assert record.read(tmp_path / "r") == {"a\u2028b": {1: [3]}, "c\x85d": {2: [4]}}


def test_counts_that_contradict_the_number_of_rows_are_rejected() -> None:
    with pytest.raises(InputError, match="--num-rows: 10: the sources' own counts make 100"):
        wanted_counts([Source("a", "x", count=100)], [100], 10)
    assert wanted_counts([Source("a", "x", count=10)], [100], 10) == [10]


@fuzz
@given(value=VALUES)
def test_reasons_can_be_written(value: Any) -> None:
    RowError("x", repr(value)).detail.encode()
