"""`blockdraft card`: figures come from files of the run, Hugging Face reads the metadata, a faulty draft gets none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from blockdraft.checkpoints.card import MARK, UNKNOWN
from blockdraft.pipeline.train import train
from blockdraft.settings import TrainSettings
from blockdraft.training.run_folder import BEST
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import call, free_port, own_replies, tiny_verifier_of

CELLS = [
    {"suite": "gsm8k", "draft": None, "concurrency": 1, "tokens_per_second": 10.0, "output_tokens": 640},
    {"suite": "gsm8k", "draft": "d", "k": 7, "concurrency": 1, "tokens_per_second": 25.0, "speedup": 2.5,
     "acceptance_length": 3.25, "output_tokens": 640},
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a tiny verifier, with curves."""
    root = tmp_path_factory.mktemp("card")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))
    own_replies(verifier, f"words={prompts}", root / "prepared", root / "data", 12)
    settings = TrainSettings(
        verifier_name_or_path=str(root / "verifier"), dtype="float32", data_path=root / "data", save_path=root / "run",
        num_taps=2, epochs=2.0, total_seq_len=80, max_anchors=16, mask_token_id=100, train_data_ratio=0.7,
    )  # fmt: skip
    train(settings, verifier)
    return root


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    """The checkpoint of a copy of that run."""
    return Path(shutil.copytree(trained / "run", tmp_path / "run")) / BEST


def bench_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in CELLS))
    (folder / "bench.json").write_text(json.dumps({"machine": "2 cores of X", "versions": {"vllm": "0.32.0"}}))
    return folder


def rows_of(text: str, first: str) -> list[list[str]]:
    """The cells of the table rows that begin with a word."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_card_states_what_the_files_of_the_run_do(
    run_copy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = bench_folder(tmp_path / "bench")
    arguments = ("card", run_copy, "--license", "apache-2.0", "--base-model", "org/verifier", "--bench", bench)
    code, out, err = call(capsys, *arguments, "--json")
    result = json.loads(out)
    assert (code, result["unknown"]) == (0, []), (result, err)
    text = (run_copy / "README.md").read_text()
    assert MARK in text
    unknown = [line for line in text.split("## Limits")[0].splitlines() if UNKNOWN in line]
    assert set(unknown) <= {f"| verifier revision | {UNKNOWN} |", f"| processes | {UNKNOWN} |"}
    stated = ModelCard.load(run_copy / "README.md").data
    assert (stated.license, stated.base_model, stated.library_name) == ("apache-2.0", "org/verifier", "vllm")
    assert {"speculative-decoding", "dflash"} <= set(stated.tags or [])

    record = json.loads((trained / "data" / "data_config.json").read_text())
    provenance = json.loads((run_copy / "provenance.json").read_text())
    counts = record["sources"]["words"]
    wanted = [counts["read"], counts["kept"], counts["documents"]]
    (words,), (every,) = rows_of(text, "words"), rows_of(text, "all")
    assert words[1:] == every[1:] == [str(n) for n in (*wanted, counts["tokens"]["learned"])]
    held = counts["documents"] - provenance["train_documents"]
    assert f"Examples trained on: {provenance['train_documents']}; held out for validation: {held}." in text
    best = provenance["validation"][-1]
    assert rows_of(text, str(best["step"]))[0][1] == f"{best['acceptance_length']:.3f}"
    assert rows_of(text, "lr") == [["lr", str(provenance["settings"]["lr"])]]
    assert rows_of(text, "gsm8k")[1][1:] == ["d", "7", "1", "640", "25.00", "2.50", "3.25"]
    assert "Hardware: 2 cores of X. Versions: vllm 0.32.0." in text
    names = {str(path.relative_to(run_copy)) for path in run_copy.rglob("*") if path.is_file()}
    assert {"training_state.json", "train_command.txt", "val_metrics.json"} <= names
    state = json.loads((run_copy / "training_state.json").read_text())
    assert state["epoch"] == 2.0 * state["step"] / state["total_steps"] and state["step"] == provenance["step"]
    assert {"summary.json", "data_config.json", "benchmarks/results.jsonl", "benchmarks/bench.json"} <= names
    assert any(name.startswith("logs/") and "tfevents" in name for name in names)
    # The folder alone is enough to write the same card again, and check finds nothing wrong in it.
    moved = Path(shutil.copytree(run_copy, tmp_path / "moved" / run_copy.name))
    assert call(capsys, *arguments[:1], moved, *arguments[2:-2])[0] == 0
    assert (moved / "README.md").read_text() == text
    assert call(capsys, "check", moved)[0] == 0


def test_the_commands_are_those_of_serve(run_copy: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "card", run_copy)[0] == 0
    text = (run_copy / "README.md").read_text()
    shown = re.findall(r"^vllm (serve .*)$", text, re.MULTILINE)
    assert len(shown) == 2
    for k, command in zip((7, 3), shown, strict=True):
        port = free_port()
        served = ("serve", run_copy, "--k", k, "--dtype", "float32", "--port", port, "--dry-run", "--json")
        _, out, _ = call(capsys, *served)
        planned = json.loads(out)["command"]
        words = shlex.split(command.replace("--port 8000", f"--port {port}"))
        at = words.index("--speculative-config") + 1
        assert words[:at] == planned[1 : at + 1]
        theirs = json.loads(planned[at + 1])
        assert json.loads(words[at]) == {**theirs, "model": run_copy.name}
        assert words[at + 1 :] == planned[at + 2 :]


def test_no_card_while_check_fails(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mask_token_id": 5}))
    code, out, _ = call(capsys, "card", run_copy)
    assert code == 1 and "error: mask-token: contract mask_token_id: 100" in out and "no card was written" in out
    assert not (run_copy / "README.md").exists() and not (run_copy / "logs").exists()


def test_a_draft_without_records_says_what_is_unknown(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Path(shutil.copytree(run_copy, tmp_path / "alone" / "draft"))
    (alone / "provenance.json").write_text("{}")
    (alone / "val_metrics.json").unlink()
    code, out, _ = call(capsys, "card", alone, "--json")
    unknown = ["license", "base model", "training records", "data", "validation", "benchmarks"]
    assert (code, json.loads(out)["unknown"]) == (0, unknown)
    text = (alone / "README.md").read_text()
    for line in ("Sources and counts: not recorded.", "Command: not recorded.", "License of the draft: not recorded."):
        assert line in text
    assert "license:" not in text.split("---")[1] and "base_model" not in text.split("---")[1]


def test_a_push_that_is_tried_lists_the_files_and_writes_none(
    run_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    code, out, _ = call(capsys, "card", run_copy, "--push", "org/draft", "--dry-run", "--json")
    result = json.loads(out)
    assert code == 0 and result["pushed to"] is None
    assert {"README.md", "config.json", "model.safetensors", "provenance.json", "summary.json"} <= result[
        "files"
    ].keys()
    assert any(name.startswith("logs/") for name in result["files"])
    assert '"model": "org/draft"' in result["text"] and "# draft" in result["text"]
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before
    monkeypatch.setattr("blockdraft.pipeline.card.get_token", lambda: None)
    code, _, err = call(capsys, "card", run_copy, "--push", "org/draft")
    assert code == 2 and "--push: org/draft: not logged in to the hub" in err and not (run_copy / "README.md").exists()


def test_wrong_use_is_rejected_before_anything_is_written(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench").mkdir()
    wrong = {
        "--bench": (tmp_path / "bench", "no such file"),
        "--base-model": ("/somewhere/local", "must be a hub id"),
        "--push": ("no-owner", "must be a hub id"),
    }
    for flag, (value, hint) in wrong.items():
        code, _, err = call(capsys, "card", run_copy, flag, value)
        assert code == 2 and err.count("\n") == 1 and flag in err and hint in err
    (tmp_path / "bench" / "results.jsonl").write_text('{"suite": "a"}\n{broken\n')
    code, _, err = call(capsys, "card", run_copy, "--bench", tmp_path / "bench")
    assert code == 2 and "--bench line 2" in err
    assert not (run_copy / "README.md").exists()
    (run_copy / "README.md").write_text("# by hand\n")
    code, _, err = call(capsys, "card", run_copy)
    assert code == 2 and "was not written by `blockdraft card`" in err
    assert (run_copy / "README.md").read_text() == "# by hand\n"
