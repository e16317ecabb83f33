"""Preparing data: rows a second with one and two processes, and beside Speculators' prepare-data on the same file.

    python benchmarks/prepare.py math=gsm8k.jsonl code=instructions.json pairs=wikisplit.tsv --times 10 \
        --peer-python PEER/bin/python --verifier runs/verifier --out docs/results.md

Speculators 0.9 has every conversation rendered by a vLLM server; start one of the verifier before
(`vllm launch render runs/verifier`). It idles while our command runs.

The sources are turned into one file of conversations first, which everybody reads. A run is a command from start to
end, so that everybody pays for its imports; runs take turns (A B A B). Memory is the largest sum over the command's
processes. With --times N, our command also prepares N times as many rows, each made different by a number in front.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from blockdraft.runtime import prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

from blockdraft.data.conversations import Conversation, RowError  # noqa: E402
from blockdraft.data.converters import convert  # noqa: E402
from blockdraft.data.readers import read_rows  # noqa: E402
from blockdraft.data.sources import parse_sources  # noqa: E402
from blockdraft.runtime import machine_description  # noqa: E402

COLUMNS = ("who", "rows", "processes", "seconds", "rows/s", "memory, GiB", "speed beside the peer")


@dataclass(frozen=True)
class Run:
    seconds: float
    gib: float


def write_conversations(sources: tuple[str, ...], path: Path, times: int) -> int:
    """One file of conversations; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8") as handle:
        for source in parse_sources(sources, ()):
            for _, row in read_rows(source):
                try:
                    item = convert(row) if not isinstance(row, RowError) else None
                except RowError:
                    continue
                if not isinstance(item, Conversation):
                    continue
                for copy in range(times):
                    messages = [dict(turn) for turn in item.messages]
                    messages[0]["content"] = (f"{copy} " if copy else "") + messages[0]["content"]
                    handle.write(json.dumps({"conversations": messages}, ensure_ascii=False) + "\n")
                    count += 1
    return count


def held_by(process: int) -> int:
    """Bytes that a process holds: pages that forked processes share count once, files mapped into memory do not."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^Pss_Anon:\s+(\d+)", text, flags=re.MULTILINE)[1])  # type: ignore[index]


def measured(command: list[str]) -> Run:
    """Run a command; its time and the most memory that it and its children held together."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            try:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                most = max(most, sum(held_by(each.pid) for each in family))
            except (psutil.Error, OSError):
                pass
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    said = process.stderr.read()
    process.wait()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{said[-2000:]}")
    return Run(time.monotonic() - start, most / 2**30)


def cells(count: int, processes: int, run: Run) -> list[str]:
    """A run as cells of COLUMNS."""
    return [f"{count:,}", str(processes), f"{run.seconds:.1f}", f"{count / run.seconds:,.0f}", f"{run.gib:.2f}"]


def ours(verifier: str, data: Path, folder: Path, processes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "blockdraft.cli.main", "prepare", "--verifier-name-or-path", verifier),
        *("--source", f"all={data}", "--save-path", str(folder), "--num-workers", str(processes)),
    ]


def peers(python: str, endpoint: str, verifier: str, data: Path, folder: Path, processes: int) -> list[str]:
    speculators = str(Path(python).with_name("speculators"))
    return [
        *(speculators, "prepare-data", "--model", verifier, "--data", str(data), "--output", str(folder)),
        *("--seq-length", "2048", "--num-preprocessing-workers", str(processes), "--overwrite"),
        *("--token-freq-path", str(folder / "token_freq.pt"), "--render-endpoint", endpoint),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="as blockdraft prepare takes them")
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--times", type=int, default=0, help="also prepare so many times as many rows")
    parser.add_argument("--peer-python", help="python of an environment with Speculators")
    parser.add_argument("--peer-endpoint", default="http://127.0.0.1:8000", help="a vLLM server that renders")
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--section", default="prepare")
    parser.add_argument("--out", type=Path, help="file whose section is replaced by the table")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = root / "rows.jsonl"
        count = write_conversations(tuple(options.sources), data, 1)
        number = 0
        for processes in options.processes:
            runs: dict[str, list[Run]] = {"blockdraft": [], "Speculators": []}
            for repeat in range(options.repeats):
                number += 1
                runs["blockdraft"].append(measured(ours(options.verifier, data, root / f"ours-{number}", processes)))
                if options.peer_python and repeat < options.peer_repeats:
                    peer = (options.peer_python, options.peer_endpoint, options.verifier)
                    runs["Speculators"].append(measured(peers(*peer, data, root / f"peer-{number}", processes)))
            medians = {who: statistics.median(run.seconds for run in found) for who, found in runs.items() if found}
            for who, seconds in medians.items():
                beside = f"{medians['Speculators'] / seconds:.2f}" if "Speculators" in medians else ""
                gib = max(run.gib for run in runs[who])
                rows.append(
                    [
                        who,
                        f"{count:,}",
                        str(processes),
                        f"{seconds:.1f}",
                        f"{count / seconds:,.0f}",
                        f"{gib:.2f}",
                        beside,
                    ]
                )
                print(" | ".join(rows[-1]), flush=True)
        if options.times:
            many = root / "many.jsonl"
            total = write_conversations(tuple(options.sources), many, options.times)
            processes = options.processes[-1]
            run = measured(ours(options.verifier, many, root / "many", processes))
            cells = [
                f"{total:,}",
                str(processes),
                f"{run.seconds:.1f}",
                f"{total / run.seconds:,.0f}",
                f"{run.gib:.2f}",
            ]
            rows.append(["blockdraft", *cells, ""])
            print(" | ".join(rows[-1]), flush=True)
    if options.out:
        said = " ".join(f"{each.split('=')[0]}={Path(each.split('=', 1)[1]).name}" for each in options.sources)
        heading = f"`python benchmarks/prepare.py {said} ...`, {today()}; {machine_description()}."
        write_section(options.out, options.section, f"{heading}\n\n{markdown_table(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
