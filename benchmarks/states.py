"""Hidden states: examples in groups against one at a time, and a vLLM server against its own plain prefill.

    python benchmarks/states.py                              # needs `make serve-cpu`; some minutes
    python benchmarks/states.py --out docs/results.md

Texts are random tokens of lengths between 32 and 512, drawn once. In process, the verifier runs on them one by one, and
as training does, in groups by length. The server gives states as `blockdraft serve --extract` starts it, and is
compared with a plain server of the same flags that answers the same requests. All arms take turns; figures are medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from blockdraft.runtime import machine_description, prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

import httpx2 as httpx  # noqa: E402
import torch  # noqa: E402

from blockdraft.pipeline.convert import convert  # noqa: E402
from blockdraft.records import Example  # noqa: E402
from blockdraft.serving.client import wait_until_ready  # noqa: E402
from blockdraft.serving.launcher import engine_environment  # noqa: E402
from blockdraft.serving.processes import stop  # noqa: E402
from blockdraft.settings import ConvertSettings  # noqa: E402
from blockdraft.training.creation import spread_taps  # noqa: E402
from blockdraft.training.engine_states import EngineStates, Patience  # noqa: E402
from blockdraft.training.hidden_states import InProcess, grouped, longest_first  # noqa: E402
from blockdraft.verifiers.loading import load_verifier  # noqa: E402
from blockdraft.verifiers.parts import read_parts  # noqa: E402

ENGINE = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8", "--no-enable-prefix-caching")
WORKERS = 8


def texts(count: int, vocab_size: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(32, 513, (count,), generator=generator).tolist()
    ids = [torch.randint(10, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [Example.of_reply(str(number), each[:8], each[8:], "length") for number, each in enumerate(ids)]


@contextmanager
def served(command: list[str], port: int, log: Path) -> Iterator[str]:
    with log.open("wb") as output:
        environment = engine_environment(0, cpu=True, v1_runner=True)
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, lambda: process.poll() is None, 600)
        yield url
    finally:
        stop(process)


def prefilled(url: str, model: str, examples: list[Example]) -> None:
    """The same requests to a plain server."""
    with httpx.Client(trust_env=False, timeout=600) as client, ThreadPoolExecutor(WORKERS) as pool:

        def ask(example: Example) -> None:
            body = {"model": model, "prompt": list(example.input_ids), "max_tokens": 1, "temperature": 0.0}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()

        list(pool.map(ask, examples))


def timed(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, in turns, after one turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in seconds.items()}


def in_process(folder: Path, examples: list[Example], repeats: int) -> dict[str, float]:
    verifier = load_verifier(str(folder), torch.float32)
    provider = InProcess(verifier, spread_taps(verifier.identity.num_layers, 5))
    groups = [[examples[index] for index in group] for group in grouped(longest_first(examples))]
    arms: dict[str, Callable[[], object]] = {
        "one at a time": lambda: [provider.get([example]) for example in examples],
        "in groups of 16": lambda: [provider.get(group) for group in groups],
    }
    return timed(arms, repeats)


def by_server(folder: Path, work: Path, examples: list[Example], repeats: int, port: int) -> dict[str, float]:
    parts = read_parts(str(folder), torch.float32, "cpu")
    taps = spread_taps(parts.identity.num_layers, 5)
    binary = Path(sys.executable).with_name("vllm")
    common = ["--dtype", "float32", *ENGINE]
    plain = [str(binary), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), *common]
    ours = [sys.executable, "-m", "blockdraft", "serve", str(folder), "--extract", "--port", str(port + 1),
            "--states-port", str(port + 2), *common]  # fmt: skip
    ours.remove("--no-enable-prefix-caching")  # it says so itself
    with served(plain, port, work / "plain.txt") as plain_url, served(ours, port + 1, work / "ours.txt") as url:
        provider = EngineStates([url], parts, taps, patience=Patience(workers=WORKERS))
        arms: dict[str, Callable[[], object]] = {
            "plain prefill": lambda: prefilled(plain_url, str(folder), examples),
            "states from the server": lambda: provider.get(examples),
        }
        found = timed(arms, repeats)
        provider.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", type=Path, help="folder; default: SmolLM2-135M-Instruct, unpacked")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--no-server", action="store_true", help="in process alone")
    parser.add_argument("--out", type=Path, help="file whose section `states` is replaced by the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = options.verifier
        if folder is None:
            folder = work / "verifier"
            convert(ConvertSettings(source="smollm2-135m-instruct", save_path=folder))
        examples = texts(options.texts, 96 if options.verifier else 40_000)
        seconds = in_process(folder, examples, options.repeats)
        pairs = [("one at a time", "in groups of 16")]
        if not options.no_server:
            seconds |= by_server(folder, work, examples, options.repeats, options.port)
            pairs.append(("states from the server", "plain prefill"))
    tokens = sum(len(example.input_ids) for example in examples)
    rows = [
        [a, f"{tokens / seconds[a]:,.0f}", b, f"{tokens / seconds[b]:,.0f}", f"{seconds[a] / seconds[b]:.2f}"]
        for a, b in pairs
    ]
    table = markdown_table(["A", "tokens/s", "B", "tokens/s", "time of A / time of B"], rows)
    command = f"`python benchmarks/states.py --texts {options.texts} --repeats {options.repeats}`"
    text = f"{command}, {today()}; {machine_description()}.\n\n{table}"
    print(text)
    if options.out:
        write_section(options.out, "states", text)


if __name__ == "__main__":
    main()
