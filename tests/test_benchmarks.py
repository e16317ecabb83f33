"""The benchmark scripts run: a script that rots measures nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import acceptance  # noqa: E402
import soak  # noqa: E402
import t5gemma2_step  # noqa: E402
from assets.t5gemma2 import Asset  # noqa: E402
from blockdraft.serving.launcher import Launch, without_draft  # noqa: E402
from blockdraft.verifiers.loading import save_folder  # noqa: E402
from conftest import tiny_verifier_of  # noqa: E402
from report import write_section  # noqa: E402


@pytest.mark.parametrize("extra", [["--twin"], ["--twin", "--head", "--methods", "dflash"]])
@pytest.mark.slow
def test_train_step_measures_every_method_its_floor_and_its_twin(tmp_path: Path, extra: list[str]) -> None:
    out = tmp_path / "results.md"
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), "--seq-len", "64", "--anchors", "8"]
    command += ["--vocab", "512", "--repeats", "1", "--dtypes", "float32", "--loss", "ce", "--out", str(out), *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in out.read_text().splitlines() if line.startswith(("| df", "| ds"))]
    assert len(rows) == (1 if "--head" in extra else 3)
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        # Seconds are there as numbers, but so short here that they may print as 0.00.
        assert re.fullmatch(r"\d+\.\d\d", cells[6]) and re.fullmatch(r"\d+\.\d\d", cells[-2]), row
        assert float(cells[7]) > 0.1, row


def result(workload: str, method: str, lengths: list[float]) -> dict:
    history = [{"seconds": 40.0 * (i + 1), "acceptance_length": length} for i, length in enumerate(lengths)]
    return {"workload": workload, "method": method, "training": {"history": history}}


def test_the_server_without_a_draft_differs_in_nothing_else() -> None:
    command = ["vllm", "serve", "verifier", "--dtype", "float32", "--host", "127.0.0.1", "--port", "8300",
               "--speculative-config", "{}", "--per-request-spec-decode-metrics", "detailed",
               "--enforce-eager"]  # fmt: skip
    plain = without_draft(Launch(command, {"A": "1"}, "with a draft", "http://127.0.0.1:8300"), 8301)
    wanted = "vllm serve verifier --dtype float32 --host 127.0.0.1 --port 8301 --enforce-eager"
    assert (" ".join(plain.command), plain.url) == (wanted, "http://127.0.0.1:8301")
    assert plain.environment == {"A": "1"} and command[8] == "8300"


def test_a_soak_is_a_row_with_all_answers_and_the_growth_of_memory() -> None:
    memory = [
        {"server": 600.0, "Worker": 400.0},
        {"server": 610.0, "Worker": 500.0},
        {"server": 610.0, "Worker": 440.0},
    ]
    found = {"model": "tiny", "requests": 2000, "statuses": {"0": 300, "200": 1100, "400": 590, "500": 10},
             "seconds": 47.3, "memory_mib": memory}  # fmt: skip
    wanted = ["tiny", "2,000", "1,100", "590", "300", "10", "47", "1,000", "1,110", "1,050", "+5.0%"]
    assert soak.row(found) == wanted and len(wanted) == len(soak.COLUMNS)


def test_growth_is_read_at_minutes_and_drawn(tmp_path: Path) -> None:
    results = [result("records", "dflash", [1.1, 1.9, 2.5]), result("chat", "dspark", [1.2, 1.3, 1.4])]
    table = acceptance.growth_table(results, 2.0, 4)
    assert "| records | dflash |  | 1.10 | 1.90 | 2.50 |" in table
    acceptance.draw(results, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    assert text.count("<svg") == 1 and len(re.findall("minutes of training", text)) >= 2


def test_a_section_replaces_itself_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text("# Results\n\nBy hand.\n")
    write_section(path, "a", "one \\1 line")
    write_section(path, "b", "two")
    write_section(path, "a", "another")
    text = path.read_text()
    assert "By hand." in text and "two" in text and "another" in text and "one" not in text


@pytest.mark.slow
def test_preparing_is_measured_also_on_more_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "q {i}", "answer": "a {i}"}}\n' for i in range(40)))
    save_folder(tiny_verifier_of("llama"), tmp_path / "verifier")
    command = [sys.executable, str(BENCHMARKS / "prepare.py"), f"q={rows}", "--verifier", str(tmp_path / "verifier")]
    command += ["--processes", "1", "--repeats", "1", "--times", "3", "--out", str(tmp_path / "results.md")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.split(" | ") for line in (tmp_path / "results.md").read_text().splitlines() if "blockdraft |" in line]
    assert [cells[1] for cells in found] == ["40", "120"]
    assert all(float(cells[3]) > 0 and float(cells[5]) > 0.1 for cells in found)


@pytest.mark.asset
@pytest.mark.engine
def test_t5gemma2_drafts_are_measured_in_both_engines(small_asset: Asset, tmp_path: Path) -> None:
    out = tmp_path / "results.md"
    command = [sys.executable, str(BENCHMARKS / "t5gemma2_drafts.py"), str(small_asset.folder), "--rows", "24"]
    command += ["--prompts", "3", "--methods", "dflare", "--epochs", "1", "--k", "3", "--batch", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| dflare")]
    assert row[2] == "3" and row[3] == row[4] and 1 <= float(row[4]) <= float(row[5])
    assert row[6] == "0" and row[11] == "3 of 3 |"


@pytest.mark.slow
def test_a_trainer_of_parts_is_measured(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "trainer_memory.py"),
        "--sizes",
        "tiny",
        "--out",
        str(tmp_path / "r.md"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = [line.strip("|").split(" | ") for line in (tmp_path / "r.md").read_text().splitlines() if "tiny (" in line]
    imports, read, peak = map(float, row[5:8])
    assert 0 < imports <= read <= peak


def test_t5gemma2_step_counts_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"VOCABULARY": 2000, "WIDTH": 64, "HEADS": 4, "HEAD_DIM": 16, "INTERMEDIATE": 64, "LAYERS": 6, "SOURCE": 40,
             "TARGET": 30, "ANCHORS": 8, "DRAFT_VOCABULARY": 500, "DRAFT_LAYERS": 2, "TAPS": (1, 3, 6)}  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(t5gemma2_step, name, value)
    out = tmp_path / "results.md"
    monkeypatch.setattr(sys, "argv", ["t5gemma2_step.py", "--out", str(out)])
    t5gemma2_step.main()
    rows = [line for line in out.read_text().splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == [
        "verifier", "draft", "draft's head", "peak of a step", "estimate for a GPU"
    ]  # fmt: skip
    assert float(rows[4].split("|")[3]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        ("scaling", ("--steps", 1, "--turns", 1, "--hidden", 128, "--length", 64), ["one process", "two processes"]),
        ("states", ("--texts", 6, "--repeats", 1, "--no-server", "--verifier"), ["one at a time"]),
    ],
)
def test_training_at_scale_is_measured(tmp_path: Path, script: str, arguments: tuple, rows: list[str]) -> None:
    out = tmp_path / "results.md"
    if script == "states":
        save_folder(tiny_verifier_of("llama"), tmp_path / "verifier")
        arguments = (*arguments, tmp_path / "verifier")
    command = [sys.executable, BENCHMARKS / f"{script}.py", *arguments, "--out", out]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert all(re.search(rf"^\| {row}.* \| \d[\d,.]* \|", text, re.M) for row in rows), text
