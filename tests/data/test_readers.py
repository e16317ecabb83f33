"""Every file format gives the same rows; a broken line is one bad row, with its line, and not the end."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blockdraft.data.conversations import RowError
from blockdraft.data.readers import read_rows, source_digest
from blockdraft.data.sources import Source, parse_sources
from blockdraft.errors import InputError

ROWS = [{"question": f"q {i} é", "answer": f'a, "{i}"\nsecond line'} for i in range(30)]


def write_all(folder: Path) -> dict[str, str]:
    """The same rows in every format."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (folder / "r.jsonl").write_text(lines)
    (folder / "bom.jsonl").write_text("\ufeff" + lines)
    (folder / "blank.jsonl").write_text("\n" + lines.replace("\n", "\n\n"))
    (folder / "lines.json").write_text(lines)
    (folder / "array.json").write_text(json.dumps(ROWS))
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    with gzip.open(folder / "r.jsonl.gz", "wt", encoding="utf-8") as handle:
        handle.write(lines)
    with (folder / "r.csv").open("w", encoding="utf-8", newline="") as handle:
        table = csv.DictWriter(handle, ["question", "answer"])
        table.writeheader()
        table.writerows(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "r.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "arrow")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(folder / "dict")
    (folder / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "hub" / "train.parquet")
    names = ("r.jsonl", "bom.jsonl", "blank.jsonl", "lines.json", "array.json", "wrapped.json", "r.jsonl.gz", "r.csv",
             "r.parquet", "arrow", "dict", "hub")  # fmt: skip
    return {name: str(folder / name) for name in names}


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    for name, location in write_all(tmp_path).items():
        assert [row for _, row in read_rows(Source(name, location))] == ROWS, name


def test_tables_without_a_header_are_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text('one " quote\ttwo\nthree\tfour\tfive\nsix\tseven\n')
    found = list(read_rows(Source("p", str(tmp_path / "pairs.tsv"))))
    assert found[0] == (1, {"source": 'one " quote', "target": "two"})
    assert found[1][0] == 2 and isinstance(found[1][1], RowError) and found[1][1].reason == "another number of columns"
    assert found[2] == (3, {"source": "six", "target": "seven"})
    (tmp_path / "named.tsv").write_text("question\tanswer\nq\ta\n")
    assert list(read_rows(Source("p", str(tmp_path / "named.tsv")))) == [(2, {"question": "q", "answer": "a"})]


def test_broken_lines_are_rows_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": \n{"prompt": "\xff"}\n\n"text"\n{"prompt": "b"}')
    found = [(n, row.reason if isinstance(row, RowError) else row) for n, row in read_rows(Source("b", str(path)))]
    assert found == [
        (1, {"prompt": "a"}), (2, "broken JSON"), (3, "not UTF-8 text"), (5, "text"), (6, {"prompt": "b"})
    ]  # fmt: skip
    (tmp_path / "latin.csv").write_bytes("prompt,response\ncafé,1\nb,2\n".encode("latin-1"))
    reasons = [row for _, row in read_rows(Source("b", str(tmp_path / "latin.csv")))]
    assert isinstance(reasons[0], RowError) and reasons[0].reason == "not UTF-8 text"
    assert reasons[1] == {"prompt": "b", "response": "2"}
    path.write_bytes(json.dumps({"prompt": "a"}).encode("utf-16"))
    assert all(isinstance(row, RowError) for _, row in read_rows(Source("b", str(path))))


@pytest.mark.parametrize(
    ("location", "split", "hint"),
    [
        ("nowhere/at-all", None, "cannot be read"),
        ("thing.xml", None, "unknown kind of file"),
        ("builtin/nothing", None, "choose one of records, chat"),
        ("builtin/chat", "test", "choose one of train, heldout"),
        ("rows.jsonl", "train", "a file has rows only"),
        ("broken.parquet", None, "cannot be read"),
        ("broken.jsonl.gz", None, "cannot be read"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, split: str | None, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("thing.xml", "rows.jsonl", "broken.parquet", "broken.jsonl.gz"):
        Path(name).write_text("{}")
    with pytest.raises(InputError, match=hint):
        list(read_rows(Source("s", location, split)))


def test_slices_of_files(tmp_path: Path) -> None:
    location = write_all(tmp_path)["r.jsonl"]
    (source,) = parse_sources((f"s={location}:[5:8]@2",), ())
    assert [line for line, _ in read_rows(source)] == [6, 7, 8] and source.count == 2


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    digests = [source_digest(Source("a", str(path)))]
    path.rename(tmp_path / "b.jsonl")
    digests.append(source_digest(Source("other", str(tmp_path / "b.jsonl"))))
    (tmp_path / "b.jsonl").write_text("{} ")
    digests.append(source_digest(Source("a", str(tmp_path / "b.jsonl"))))
    assert digests[0] == digests[1] != digests[2]
    assert source_digest(Source("r", "builtin/records")) != source_digest(Source("r", "builtin/chat"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a=b.jsonl", Source("a", "b.jsonl")),
        ("a=b.jsonl@12", Source("a", "b.jsonl", None, 12)),
        ("a=org/set:train@0.25", Source("a", "org/set", "train", None, 0.25)),
        ("a=org/set:train[:10%]", Source("a", "org/set", "train[:10%]")),
        ("a=b@c.jsonl", Source("a", "b@c.jsonl")),
        ("a=builtin/records:heldout", Source("a", "builtin/records", "heldout")),
    ],
)
def test_sources_are_parsed(text: str, wanted: Source) -> None:
    assert parse_sources((text,), ()) == [wanted]


@pytest.mark.parametrize(
    ("texts", "converters", "hint"),
    [
        (("b.jsonl",), (), "must be name="),
        (("a=",), (), "must be name="),
        (("a=b@0",), (), "0 rows"),
        (("a=b", "a=c"), (), "two sources"),
        (("a=b",), ("c=messages",), "no source has this name"),
        (("a=b",), ("a=nothing",), "must be source=converter"),
    ],
)
def test_bad_sources_are_refused(texts: tuple[str, ...], converters: tuple[str, ...], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        parse_sources(texts, converters)
