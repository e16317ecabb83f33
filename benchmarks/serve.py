"""vLLM with a draft and without: tokens a second at batch 1 and 4, through `vllm bench serve`.

    python benchmarks/serve.py runs/draft/checkpoint_best --out docs/results.md
    python benchmarks/serve.py runs/draft/checkpoint_best --steps DFLASH_CHECKPOINT DFLARE_CHECKPOINT

Two servers are started by blockdraft's launcher and take turns (A B A B) on the same held-out prompts; only one works
at a time. With --steps, the engine's drafting step (one call of its proposer, batch 1) is timed for two checkpoints of
the same size, in turns as well. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from blockdraft.runtime import prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

from blockdraft.data.prompts import encode_prompt  # noqa: E402
from blockdraft.data.workloads import workload_prompts  # noqa: E402
from blockdraft.pipeline.serve import planned  # noqa: E402
from blockdraft.runtime import machine_description  # noqa: E402
from blockdraft.serving.launcher import Launch, without_draft  # noqa: E402
from blockdraft.serving.processes import running  # noqa: E402
from blockdraft.settings import ServeSettings  # noqa: E402

STEP_WORKER = Path(__file__).parent / "steps" / "served.py"
COLUMNS = ("batch", "tokens/s without", "tokens/s with the draft", "ratio", "acceptance length (engine)")


def prompt_file(verifier: str, workload: str, count: int, max_tokens: int, folder: Path) -> Path:
    """Prompts as the bench client reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as handle:
        for conversation in workload_prompts(workload)[1][:count]:
            text = tokenizer.decode(encode_prompt(tokenizer, conversation))
            handle.write(json.dumps({"prompt": text, "output_tokens": max_tokens}) + "\n")
    return path


def bench(plan: Launch, prompts: Path, count: int, batch: int, folder: Path) -> dict[str, Any]:
    """One run of `vllm bench serve`; returns its result file."""
    command = [
        *(plan.command[0], "bench", "serve", "--backend", "openai", "--base-url", plan.url),
        *("--model", plan.command[2], "--tokenizer", plan.command[2], "--dataset-name", "custom"),
        *("--dataset-path", str(prompts), "--num-prompts", str(count), "--custom-output-len", "-1"),
        *("--skip-chat-template", "--disable-shuffle", "--no-oversample", "--max-concurrency", str(batch)),
        *("--request-rate", "inf", "--temperature", "0", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "run.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def throughput(options: argparse.Namespace) -> list[list[str]]:
    """Rows of COLUMNS."""
    settings = ServeSettings(
        checkpoint=options.checkpoint, k=options.k, dtype=options.dtype, port=options.port,
        engine_arguments=tuple(options.engine_arguments),
    )  # fmt: skip
    drafted = planned(settings)
    plain = without_draft(drafted, options.port + 1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = prompt_file(drafted.command[2], options.workload, options.prompts, options.max_tokens, folder)
        with running(plain, folder / "plain.log"), running(drafted, folder / "drafted.log"):
            for batch in options.batch:
                rates: dict[str, list[float]] = {"plain": [], "drafted": []}
                length = float("nan")
                for plan in (plain, drafted):  # the first requests of a server warm it up
                    bench(plan, prompts, min(2 * batch, options.prompts), batch, folder)
                for _ in range(options.repeats):
                    for label, plan in (("plain", plain), ("drafted", drafted)):
                        found = bench(plan, prompts, options.prompts, batch, folder)
                        rates[label].append(found["output_throughput"])
                        length = found.get("spec_decode_acceptance_length", length)
                a, b = (statistics.median(rates[label]) for label in ("plain", "drafted"))
                rows.append([str(batch), f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", f"{length:.2f}"])
                print(" | ".join(rows[-1]), flush=True)
    return rows


def step_seconds(checkpoints: list[Path], repeats: int, dtype: str) -> list[float]:
    """Median seconds of the engine's drafting step for each checkpoint, in turns."""
    found: list[list[float]] = [[] for _ in checkpoints]
    for _ in range(repeats):
        for seconds, checkpoint in zip(found, checkpoints, strict=True):
            command = [sys.executable, str(STEP_WORKER), str(checkpoint), dtype]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            seconds.append(json.loads(done.stdout.splitlines()[-1])["median"])
    return [statistics.median(seconds) for seconds in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--k", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workload", default="records")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8300, help="and the one behind it")
    parser.add_argument("--steps", type=Path, nargs=2, metavar=("DFLASH", "DFLARE"), help="time these drafting steps")
    parser.add_argument("--out", type=Path, help="file whose section is replaced by the table")
    parser.add_argument("--section", default="serve")
    parser.add_argument("--engine-arguments", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    heading = f"`python benchmarks/serve.py {' '.join(sys.argv[1:])}`, {today()}; {machine_description()}."
    if options.steps:
        stock, ours = step_seconds(options.steps, options.repeats, options.dtype)
        columns = ("DFlash step, ms (engine's class)", "DFlare step, ms (plugin)", "ratio")
        rows = [[f"{1000 * stock:.2f}", f"{1000 * ours:.2f}", f"{ours / stock:.2f}"]]
        print(" | ".join(rows[0]))
    else:
        columns, rows = COLUMNS, throughput(options)
    if options.out:
        write_section(options.out, options.section, f"{heading}\n\n{markdown_table(columns, rows)}")


if __name__ == "__main__":
    main()
