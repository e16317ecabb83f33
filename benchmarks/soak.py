"""Thousands of short requests against a server with a draft: does it answer all of them, and does its memory stay?

    python benchmarks/soak.py runs/draft/checkpoint_best --out docs/results.md --json soak.json

Greedy and sampled requests, several replies at once, penalties, grammars, log probabilities, streams that the client
leaves, and wrong fields, eight at a time. Resident memory of the server's processes is read before (when 5% of the
requests warmed it up), during and after. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blockdraft.runtime import prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

import httpx2 as httpx  # noqa: E402
import psutil  # noqa: E402

from blockdraft.pipeline.serve import planned, self_test_prompts  # noqa: E402
from blockdraft.runtime import machine_description  # noqa: E402
from blockdraft.serving.client import EngineClient  # noqa: E402
from blockdraft.serving.launcher import without_draft  # noqa: E402
from blockdraft.serving.processes import running  # noqa: E402
from blockdraft.settings import ServeSettings  # noqa: E402

AT_ONCE = 8
ROLES = ("EngineCore", "Worker", "resource_tracker")
COLUMNS = ("model", "requests", "answered 200", "answered 4xx", "left by the client", "answered 5xx", "seconds",
           "memory before, MiB", "highest", "after", "growth")  # fmt: skip
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0}),
    ("greedy", {"temperature": 0, "logprobs": 3}),
    ("sampled", {"temperature": 1, "top_k": 5}),
    ("sampled", {"temperature": 0.8, "top_p": 0.9, "seed": 3, "n": 2}),
    ("sampled", {"temperature": 1.2, "presence_penalty": 1, "repetition_penalty": 1.2}),
    ("greedy", {"temperature": 0, "frequency_penalty": 1, "min_tokens": 4, "bad_words": ["the"]}),
    ("greedy", {"temperature": 0, "structured_outputs": {"regex": "[a-z0-9]+"}}),
    ("left", {"temperature": 0, "max_tokens": 64, "ignore_eos": True, "stream": True}),
    ("left", {"temperature": 1, "max_tokens": 64, "ignore_eos": True, "stream": True}),
    ("wrong", {"temperature": "hot"}),
    ("wrong", {"prompt": [5, 10**9]}),
    ("wrong", {"structured_outputs": [1]}),
)


def resident(server: psutil.Process) -> dict[str, float]:
    """MiB of a server and its processes, by what they are."""
    found: dict[str, float] = {}
    for process in (server, *server.children(recursive=True)):
        try:
            title = " ".join(process.cmdline())
            role = next((role for role in ROLES if role in title), "server")
            found[role] = found.get(role, 0.0) + process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return {role: round(size, 1) for role, size in found.items()}


def send(http: httpx.Client, model: str, prompt: list[int], fields: dict[str, Any]) -> int:
    """The status of one request; 0: the client left."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, **fields}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        if body.get("stream") and answer.is_success:
            next(answer.iter_lines(), None)
            return 0
        answer.read()
        return answer.status_code


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    settings = ServeSettings(
        checkpoint=options.checkpoint, dtype=options.dtype, port=options.port,
        engine_arguments=tuple(options.engine_arguments),
    )  # fmt: skip
    plan, prompts, draw = planned(settings), self_test_prompts(settings), random.Random(options.seed)
    plan = without_draft(plan, options.port) if options.without_draft else plan
    jobs = [(draw.choice(prompts), *draw.choice(KINDS)) for _ in range(options.requests)]
    statuses: dict[int, int] = {}
    memory = []
    with tempfile.TemporaryDirectory() as folder, running(plan, Path(folder) / "log.txt") as process:
        server, part = psutil.Process(process.pid), max(1, options.requests // 20)
        with (
            EngineClient(plan.url) as client,
            httpx.Client(base_url=plan.url, timeout=600, trust_env=False) as http,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            model, start = client.model, time.perf_counter()
            for at in range(0, len(jobs), part):
                some = pool.map(lambda job: send(http, model, job[0], job[2]), jobs[at : at + part])
                for status in some:
                    statuses[status] = statuses.get(status, 0) + 1
                memory.append(resident(server))
                print(f"{at + part} requests, {memory[-1]}", file=sys.stderr, flush=True)
            seconds = time.perf_counter() - start
            assert http.get("/health").is_success
    return {
        "model": (options.name or Path(plan.command[2]).name) + (" without a draft" if options.without_draft else ""),
        "requests": len(jobs),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "kinds": {kind: sum(job[1] == kind for job in jobs) for kind in sorted({job[1] for job in jobs})},
        "seconds": round(seconds, 1),
        "memory_mib": memory,
        "machine": machine_description("cpu"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def row(found: dict[str, Any]) -> list[str]:
    """One run as a row of COLUMNS."""
    counts = {int(status): count for status, count in found["statuses"].items()}

    def answered(first: int) -> str:
        return f"{sum(count for status, count in counts.items() if status // 100 == first):,}"

    memory = [sum(each.values()) for each in found["memory_mib"]]
    before, after = memory[0], memory[-1]
    return [
        found["model"], f"{found['requests']:,}", answered(2), answered(4), answered(0), answered(5),
        f"{found['seconds']:.0f}", f"{before:,.0f}", f"{max(memory):,.0f}", f"{after:,.0f}",
        f"{after / before - 1:+.1%}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--name", help="of the model, in the table")
    parser.add_argument("--without-draft", action="store_true", help="the same server without it, to compare with")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8320)
    parser.add_argument("--json", type=Path, nargs="+", default=[], help="write the run to the first; read the others")
    parser.add_argument("--out", type=Path, help="file whose section is replaced by the table")
    parser.add_argument("--engine-arguments", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    runs = [soak(options)]
    if options.json:
        options.json[0].write_text(json.dumps(runs[0], indent=1) + "\n", encoding="utf-8")
        runs += [json.loads(path.read_text(encoding="utf-8")) for path in options.json[1:]]
    rows = [row(found) for found in runs]
    print("\n".join(" | ".join(cells) for cells in rows))
    if options.out:
        heading = f"`python benchmarks/soak.py {' '.join(sys.argv[1:])}`, {today()}; {runs[0]['machine']}."
        write_section(options.out, "soak", f"{heading}\n\n{markdown_table(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
