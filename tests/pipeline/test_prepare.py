"""Data folders: exact counts, the same bytes however they come about, every row accounted for."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.cli.tables import show_prepared
from blockdraft.data import preparation
from blockdraft.data.mixture import place
from blockdraft.data.table import RECORD, REJECTS, TABLE, Examples, read_examples, read_table
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.errors import InputError
from blockdraft.pipeline import prepare as module
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.settings import PrepareSettings, RegenerateSettings, SamplingSettings, build
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import IMAGE, tiny_verifier_of
from data.data_hub import data_hub

WORDS = [f"w{i}" for i in range(93)]
COUNTS = {"messages": 700, "pairs": 600, "alpaca": 400, "csv": 200, "ids": 100}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("verifier") / "tiny"
    save_folder(tiny_verifier_of("llama"), folder)
    return str(folder)


def text(draw: random.Random, longest: int = 12) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, longest)))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Five sources in five shapes, each with more rows than are taken, duplicates and unusable rows among them."""
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(5)
    pairs = [(text(draw), text(draw)) for _ in range(800)]
    talks = []
    for _ in range(900):
        roles = ["user", "assistant"] * draw.randint(1, 3)
        talks.append({"messages": [{"role": role, "content": text(draw)} for role in roles]})
    rows: dict[str, list[Any]] = {
        "messages": [*talks, *talks[:9], {"messages": []}, "{broken"],
        "pairs": [{"prompt": a, "response": b} for a, b in pairs],
        "alpaca": [{"instruction": text(draw), "input": text(draw), "output": text(draw)} for _ in range(500)],
        "ids": [{"input_ids": draw.choices(range(3, 90), k=20), "loss_mask": [0] * 8 + [1] * 12} for _ in range(150)],
    }
    paths = {name: write_lines(folder / f"{name}.jsonl", found) for name, found in rows.items()}
    lines = [f'"{text(draw)}","{text(draw)}"' for _ in range(300)]
    paths["csv"] = folder / "table.csv"
    paths["csv"].write_text("question,answer\n" + "\n".join(lines) + "\n")
    return {name: paths[name] for name in COUNTS}


def settings_of(verifier: str, sources: dict[str, Path], folder: Path | None, **changes: Any) -> PrepareSettings:
    given = {"source": tuple(f"{name}={path}@{COUNTS[name]}" for name, path in sources.items()), **changes}
    return PrepareSettings(verifier_name_or_path=verifier, save_path=folder, **given)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_mixture_has_exactly_the_counts_and_every_row_is_accounted_for(
    verifier: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    result = prepare(settings_of(verifier, sources, tmp_path / "data"))
    examples = read_examples(tmp_path / "data", "data")
    assert len(examples) == result["documents"] == 2000
    column = examples.column("source")
    assert {name: column.count(name) for name in COUNTS} == COUNTS
    for name, counts in result["sources"].items():
        assert counts["read"] == counts["kept"] + sum(counts["dropped"].values()) + sum(counts["rejected"].values())
        assert counts["kept"] == counts["documents"] == COUNTS[name]
    assert result["sources"]["messages"]["dropped"]["duplicate"] == 9
    assert result["sources"]["messages"]["rejected"] == {"no messages": 1, "broken JSON": 1}
    rejected = [json.loads(line) for line in (tmp_path / "data" / REJECTS).read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == [(910, "no messages"), (911, "broken JSON")]
    assert len({*column[:40]}) == 5  # shuffled, not one source after the other
    assert result["train"] + result["validation"] == 2000 and 140 < result["validation"] < 260
    supervised = sum(len(example.supervised) for example in examples)
    assert supervised == sum(counts["tokens"]["learned"] for counts in result["sources"].values())
    show_prepared(result)


@pytest.mark.slow
def test_the_same_settings_give_the_same_bytes(
    verifier: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_FEW", 50)
    for name, workers in (("one", 1), ("again", 1), ("two", 2)):
        prepare(settings_of(verifier, sources, tmp_path / name, num_workers=workers))
    assert files(tmp_path / "one") == files(tmp_path / "again") == files(tmp_path / "two")
    prepare(settings_of(verifier, sources, tmp_path / "other", seed=43))
    one, other = (read_examples(tmp_path / name, "data").column("id") for name in ("one", "other"))
    assert one != other and set(one) != set(other)


# Children fork from a process without threads that has imported what they need: a fork of this one may wait for a lock
# that a thread of it held.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["blockdraft.pipeline.prepare"])


def prepare_watched(settings: PrepareSettings, count: Any, last: int) -> None:
    """Prepare, counting the operations on files; the process is killed at the `last` one (0: at none)."""

    def watch(event: str, _: Any) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"):
            count.value += 1
            if count.value == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    prepare(settings)


def in_a_child(settings: PrepareSettings, last: int = 0) -> int:
    """`prepare_watched` in a child: how many operations there were."""
    count = CHILDREN.Value("i", 0)
    child = CHILDREN.Process(target=prepare_watched, args=(settings, count, last))
    child.start()
    child.join()
    assert child.exitcode == (-signal.SIGKILL if last else 0)
    return int(count.value)


def test_a_kill_at_any_moment_and_a_rerun_give_the_clean_result(
    verifier: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(verifier, sources, tmp_path / "killed", num_workers=1)
    whole = in_a_child(settings_of(verifier, sources, tmp_path / "clean", num_workers=1))
    for share in (0.1, 0.35, 0.6, 0.8, 0.95):
        in_a_child(settings, int(share * whole))
    prepare(settings)
    assert files(tmp_path / "killed") == files(tmp_path / "clean")
    assert {path.name for path in tmp_path.iterdir()} == {"clean", "killed"}  # nothing of the killed runs is left


def test_a_finished_folder_is_read_and_one_of_other_settings_refused(
    verifier: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(verifier, sources, tmp_path / "data")
    made = prepare(settings)
    with monkeypatch.context() as patch:
        patch.setattr(module, "Preparation", None)  # reading must not prepare
        assert prepare(settings) == json.loads(json.dumps(made))
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "lookup"}]')
    changes: list[dict[str, Any]] = [
        {"seed": 1}, {"thinking": "on"}, {"max_length": 30}, {"prompts_only": True}, {"train_data_ratio": 0.5},
        {"source": settings.source[1:]}, {"tools": tools}, {"converter": ("pairs=prompt:response",)},
        {"rewritten_history": "split"},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(InputError, match="choose another folder or delete this one"):
            prepare(settings_of(verifier, sources, tmp_path / "data", **change))
    first = next(iter(sources.values()))
    before = first.read_text()
    first.write_text(before + "\n")
    try:
        with pytest.raises(InputError, match="was made with sources"):
            prepare(settings)
    finally:
        first.write_text(before)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        prepare(settings_of(verifier, sources, tmp_path / "full"))
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_a_recipe_names_the_mixture(verifier: str, sources: dict[str, Path], tmp_path: Path) -> None:
    lines = [f"- {name}={path}@{COUNTS[name]}" for name, path in sources.items()]
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text("\n".join(["thinking: 'off'", "source:", *lines, f"verifier-name-or-path: {verifier}"]))
    settings = build(PrepareSettings, {"save_path": tmp_path / "d"}, recipe)
    assert prepare(settings)["facts"]["thinking"] == "off"
    assert len(read_examples(tmp_path / "d", "d")) == 2000


def test_rows_that_are_added_move_no_other_across_the_split(verifier: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = [{"prompt": text(draw), "response": text(draw)} for _ in range(400)]
    sides = []
    for name, some in (("few", rows[100:300]), ("all", rows)):
        path = write_lines(tmp_path / f"{name}.jsonl", some)
        prepare(settings_of(verifier, {}, tmp_path / name, source=(f"s={path}",)))
        table = read_table(tmp_path / name, "data").select(["conversation", "key"]).to_pylist()
        sides.append({row["conversation"]: place(row["key"]) < 0.9 for row in table})
    assert all(sides[1][key] == side for key, side in sides[0].items()) and len(sides[0]) == 200


def test_questions_of_an_evaluation_file_are_left_out(verifier: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i} w1", "response": "w2 w3"} for i in range(50)]
    path = write_lines(tmp_path / "train.jsonl", rows)
    asked = [{"question": f" W{i}  w1", "answer": "w9"} for i in range(0, 50, 5)]
    kept_out = write_lines(tmp_path / "eval.jsonl", asked)
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"s={path}",), exclude_overlap=(kept_out,)))
    assert result["sources"]["s"]["dropped"] == {"overlap": 10} and result["documents"] == 40
    table = Examples(read_table(tmp_path / "d", "d"))
    left = {json.loads(text)["messages"][0]["content"] for text in table.column("conversation")}
    assert not {f"w{i} w1" for i in range(0, 50, 5)} & left


def test_equal_rows_of_two_sources_count_once(verifier: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "response": "w2 w3"} for i in range(20)]
    one = write_lines(tmp_path / "one.jsonl", rows)
    two = write_lines(tmp_path / "two.jsonl", [{"messages": [
        {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}
    ]} for row in rows[10:]] + [{"prompt": "w50", "response": "w2"}])  # fmt: skip
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"a={one}", f"b={two}")))
    assert result["sources"]["a"]["kept"] == 20 and result["sources"]["b"]["kept"] == 1
    assert result["sources"]["b"]["dropped"] == {"duplicate": 10}


def test_rows_that_fall_out_while_encoding_are_replaced(verifier: str, tmp_path: Path) -> None:
    """A third of the rows is over the limit; the count is met from the others, and asked for more it says so."""
    rows = [{"prompt": "w1 " * (30 if i % 3 == 0 else 3) + f"w{i}", "response": "w2 w3"} for i in range(90)]
    path = write_lines(tmp_path / "s.jsonl", rows)
    options = {"max_length": 20, "max_reject_share": 0.5}
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"s={path}@60",), **options))
    assert result["documents"] == 60 and result["sources"]["s"]["kept"] == 60
    assert result["sources"]["s"]["rejected"] == {"no reply within the limit": 30}
    with pytest.raises(InputError, match="61 rows asked for, 60 usable"):
        prepare(settings_of(verifier, {}, tmp_path / "more", source=(f"s={path}@61",), **options))
    assert not (tmp_path / "more").exists()


def test_what_is_cut_is_counted(verifier: str, tmp_path: Path) -> None:
    rows = [{"prompt": "w1 w2", "response": " ".join(WORDS[: 5 + i])} for i in range(30)]
    path = write_lines(tmp_path / "s.jsonl", rows)
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"s={path}",), max_length=20))
    lengths = [len(example.input_ids) for example in read_examples(tmp_path / "d", "d")]
    assert max(lengths) == 20
    cut = result["sources"]["s"]["cut"]
    whole = prepare(settings_of(verifier, {}, tmp_path / "whole", source=(f"s={path}",)))
    assert whole["sources"]["s"]["tokens"]["text"] == sum(lengths) + cut["text tokens"]
    uncut = [len(example.input_ids) for example in read_examples(tmp_path / "whole", "d")]
    assert cut["texts"] == sum(length > 20 for length in uncut) > 0
    options = {"max_length": 20, "overlong": "drop", "max_reject_share": 1}
    dropped = prepare(settings_of(verifier, {}, tmp_path / "x", source=(f"s={path}",), **options))
    assert dropped["sources"]["s"]["rejected"] == {"over the limit": cut["texts"]}


ROWS_BAD: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "w1"}]},
    {"messages": [{"role": "assistant", "content": "w1"}, {"role": "user", "content": "w2"}]},
    {"messages": [{"role": "user", "content": "w1"}, {"role": "robot_x", "content": "w2"}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "w1"}]},
    {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "w1"}]},
    {"messages": [{"role": "user", "content": ["w1"]}, {"role": "assistant", "content": "w1"}]},
    {"id": "same", "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w1"}]},
    {"id": "same", "messages": [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w1"}]},
    {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w1 " * 13_000}]},
    {"messages": [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "<think> w1 </think> w2"}]},
    {"messages": [{"role": "user", "content": "Привет"}, {"role": "assistant", "content": "日本語"}]},
    '{"messages": [',
]  # fmt: skip
REASONS = {
    1: "no messages", 2: "no user turn", 3: "does not start with the user", 4: "unknown role", 5: "empty content",
    6: "null content", 7: "content is not text", 9: "duplicate id", 13: "broken JSON",
}  # fmt: skip


def test_bad_rows_are_named_one_by_one_and_too_many_stop_the_run(verifier: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", ROWS_BAD)
    with pytest.raises(InputError, match=r"bad: 9 of its 13 rows cannot be used.*every bad row is named in"):
        prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"bad={path}",)))
    assert not (tmp_path / "d").exists()
    beside = tmp_path / f"d.{REJECTS}"
    assert len(beside.read_text().splitlines()) == 9
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=(f"bad={path}",), max_reject_share=0.8))
    rows = [json.loads(line) for line in (tmp_path / "d" / REJECTS).read_text().splitlines()]
    assert {row["line"]: row["reason"] for row in rows} == REASONS
    assert all(row["file"] == str(path) and row["source"] == "bad" for row in rows)
    assert not beside.exists()  # the folder that is made now has its own
    assert result["documents"] == 4
    assert result["sources"]["bad"]["cut"] == {"texts": 1, "text tokens": 13_003 - 2048}


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"source": ("empty={empty}",)}, "empty: no usable row"),
        ({"source": ("bad={bad}",)}, "cannot be used"),
        ({"source": ("s={good}@500",)}, "500 rows asked for"),
        ({"source": ("s={good}",), "exclude_overlap": ("{good}",)}, "no usable row .overlap"),
        ({"source": ("s={good}",), "exclude_overlap": ("nowhere.jsonl",)}, "cannot be read"),
        ({"source": ("s={good}",), "verifier_name_or_path": "./nowhere"}, "no model folder there"),
    ],
)
def test_what_cannot_be_prepared_is_refused(verifier: str, tmp_path: Path, changes: dict, hint: str) -> None:
    paths = {
        "empty": write_lines(tmp_path / "empty.jsonl", []),
        "bad": write_lines(tmp_path / "bad.jsonl", ['{"x"', "[1]"]),
        "good": write_lines(tmp_path / "good.jsonl", [{"prompt": f"w{i}", "response": "w1"} for i in range(9)]),
    }
    given = {"verifier_name_or_path": verifier, **changes}
    given["source"] = tuple(each.format(**paths) for each in given["source"])
    given["exclude_overlap"] = tuple(Path(each.format(**paths)) for each in given.get("exclude_overlap", ()))
    with pytest.raises(InputError, match=hint):
        prepare(PrepareSettings(save_path=tmp_path / "d", **given))
    assert not (tmp_path / "d").exists()


def test_a_preview_shows_what_is_supervised_and_writes_nothing(
    verifier: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = prepare(settings_of(verifier, sources, None, preview=2))
    shown = result["preview"]
    assert [text["source"] for text in shown] == [name for name in COUNTS for _ in range(2)]
    assert all(any(supervised for _, supervised in text["pieces"]) for text in shown)
    show_prepared(result)
    assert "green = supervised" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_prompts_for_the_verifier_to_answer(verifier: str, tmp_path: Path) -> None:
    result = prepare(settings_of(verifier, {}, tmp_path / "d", source=("demo=builtin/chat@40",), prompts_only=True))
    assert result["documents"] == 40 and result["sources"]["demo"]["tokens"]["learned"] == 0
    with pytest.raises(InputError, match="run blockdraft regenerate on it"):
        read_examples(tmp_path / "d", "--data-path")
    assert (tmp_path / "d" / RECORD).is_file() and (tmp_path / "d" / TABLE).is_file()


def test_pairs_for_an_encoder(tiny_seq2seq: EncoderDecoderVerifier, tmp_path: Path) -> None:
    """Source and target stand on their own sides, are cut apart, and the verifier's own target takes its place."""
    save_folder(tiny_seq2seq, tmp_path / "verifier")
    draw = random.Random(2)
    pairs = [(text(draw, 30), text(draw, 30)) for _ in range(30)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    name, source = str(tmp_path / "verifier"), (f"p={tmp_path / 'pairs.tsv'}",)
    result = prepare(settings_of(name, {}, tmp_path / "d", source=source, max_source_length=20, max_length=16))
    examples = read_examples(tmp_path / "d", "d")
    start, end = tiny_seq2seq.decoder_start, tiny_seq2seq.tokenizer.eos_token_id
    for example in examples:
        assert example.input_ids[0] == start and example.targets == ((1, len(example.input_ids)),)
        assert example.source_ids and len(example.source_ids) <= 20 and len(example.input_ids) <= 16
        assert (example.input_ids[-1] == end) == (example.finish == "stop")
    cut = result["sources"]["p"]["cut"]
    assert cut["sources"] == sum(len(a.split()) + 1 > 20 for a, _ in pairs) > 0
    assert cut["texts"] == sum(len(b.split()) + 2 > 16 for _, b in pairs) > 0
    prepare(settings_of(name, {}, tmp_path / "prompts", source=source, prompts_only=True, max_source_length=20))
    settings = RegenerateSettings(
        verifier_name_or_path=name, dtype="float32", data_path=tmp_path / "prompts", save_path=tmp_path / "own",
        max_new_tokens=8,
    )  # fmt: skip
    regenerate(settings)
    verifier = load_verifier(name, torch.float32)
    engine = DecodingEngine(verifier, None, 0, SamplingSettings(max_new_tokens=8))
    for example in read_examples(tmp_path / "own", "own"):
        (reply,) = engine.generate([example.source_ids or []], 1)
        assert example.input_ids == [start, *reply.tokens]


def test_texts_with_image_tokens_are_left_out(tiny_seq2seq: EncoderDecoderVerifier, tmp_path: Path) -> None:
    save_folder(tiny_seq2seq, tmp_path / "verifier")
    ids = [{"input_ids": [1, 5, 6], "loss_mask": [0, 1, 1], "source_ids": [7, 8, bad]} for bad in (9, IMAGE, 10, 11)]
    path = write_lines(tmp_path / "ids.jsonl", ids)
    settings = settings_of(str(tmp_path / "verifier"), {}, tmp_path / "d", source=(f"s={path}",), max_reject_share=0.5)
    tokens = prepare(settings)["sources"]["s"]
    assert tokens["rejected"] == {"image tokens in the text": 1} and tokens["kept"] == 3


@pytest.mark.slow
def test_a_hub_data_set_that_changed_is_named(verifier: str, tmp_path: Path) -> None:
    """The commit is part of what a folder was made from; rows are read at it."""
    rows = [json.dumps({"prompt": word}) + "\n" for word in WORDS]
    older, newer = "a" * 40, "b" * 40
    command = [sys.executable, "-m", "blockdraft.cli.main", "prepare", "--source", "chat=org/set", "--prompts-only",
               "--verifier-name-or-path", verifier, "--json"]  # fmt: skip
    variables = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}

    def run(name: str, hub: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--save-path", str(tmp_path / name)], capture_output=True, text=True,
            env={**variables, "HF_ENDPOINT": hub},
        )  # fmt: skip

    with data_hub({older: "".join(rows[:20])}) as (url, hub):
        done = run("data", url)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["facts"]["sources"]["chat"]["revision"] == older and record["documents"] == 20
        assert run("data", url).returncode == 0
        hub.commits[newer] = "".join(rows).encode()
        stale = run("data", url)
        assert stale.returncode == 2 and stale.stderr.count("\n") == 1
        assert f"sources.chat.revision '{older}', now asked for '{newer}'" in stale.stderr
        assert json.loads(run("other", url).stdout)["documents"] == len(rows)
        assert {commit for commit, _ in hub.asked} == {older, newer}
    gone = run("third", url)
    assert gone.returncode == 2 and gone.stderr.count("\n") == 1 and "chat=org/set: cannot be read" in gone.stderr
