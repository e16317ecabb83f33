"""A real server on loopback, as `blockdraft serve` starts it: parity, streaming, load, aborts, preemption, its end."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from blockdraft import __version__
from blockdraft.data.table import read_examples
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.serving.client import EngineClient
from blockdraft.serving.launcher import Launch
from blockdraft.serving.processes import running, stop
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from conftest import call, free_port
from serving.fixtures import Checkpoint, OwnText

pytestmark = [pytest.mark.real, pytest.mark.engine]

BLOCKDRAFT = (sys.executable, "-m", "blockdraft.cli.main")
# Few and small cache blocks, so that eight requests at once cannot all be kept.
ENGINE = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "352", "--block-size", "32",
          "--num-gpu-blocks-override", "16", "--no-enable-prefix-caching")  # fmt: skip


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    record: Path
    log: Path
    checkpoint: Checkpoint

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.M))


@pytest.fixture(scope="module")
def server(
    trained_checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    checkpoint = trained_checkpoint("dflare")
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    record = folder / "blocks.jsonl"
    command = [*BLOCKDRAFT, "serve", str(checkpoint.folder), "--dtype", "float32", "--port", str(port), "--record",
               str(record), *ENGINE]  # fmt: skip
    plan = Launch(command, {}, "", f"http://127.0.0.1:{port}")
    log = folder / "log.txt"
    with running(plan, log) as process:
        yield Server(process, plan.url, record, log, checkpoint)


def test_every_process_of_the_server_says_once_that_the_plugin_is_active(server: Server) -> None:
    """The server's own, which has no name yet when it says so, and the engine's."""
    line = rf"^(\(\w+ pid=\d+\) )?.* blockdraft {__version__} is active in vLLM 0\.32.*BlockDraftModel.*patched: "
    said = re.findall(line, server.log.read_text(), re.M)
    assert len(said) == len(set(said)) and any(process.startswith("(EngineCore") for process in said), said
    assert any(not process.startswith("(EngineCore") for process in said), said


def test_parity_with_a_running_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys, "parity", str(server.checkpoint.folder), "--dtype", "float32", "--endpoint", server.url, "--record",
        str(server.record), "--max-prompts", "4", "--max-new-tokens", "24", "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    found = result["k"]["7"]
    assert result["mismatches"] == found["ties"] == 0 and found["blocks_recorded"]
    lengths = found["acceptance_length"]
    assert lengths["vllm"] == lengths["reference"] > 1
    assert abs(lengths["vllm_counters"] - lengths["vllm"]) < 1  # counted beyond the end of replies


def test_generate_streams_from_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", server.checkpoint.folder, "--engine", "vllm", "--endpoint", server.url)
    code, out, err = call(capsys, *arguments, "Say hello.", "--max-new-tokens", "8", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["k"] == 7 and len(result["replies"][0]["tokens"]) <= 8 and result["acceptance_length"] >= 1
    code, _, err = call(capsys, *arguments, "Say hello.", "--show-drafts")
    assert code == 2 and err.startswith("blockdraft: --show-drafts: True:")
    code, _, err = call(capsys, "generate", server.checkpoint.folder, "x", "--engine", "vllm", "--endpoint",
                        "http://127.0.0.1:9")  # fmt: skip
    assert code == 2 and "no vLLM server answers there" in err


def test_replies_through_the_server_are_those_of_this_process(
    server: Server, real_verifier: CausalVerifier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations of two turns, eight requests at a time on a server that speculates: the verifier's own text."""
    rows = [{"turns": [f"Name {n} animals.", "Which one is the largest?"]} for n in ("two", "three", "four", "five")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = real_verifier.identity.name
    prepare = ("prepare", "--verifier-name-or-path", name, "--source", f"s={tmp_path / 'rows.jsonl'}",
               "--prompts-only", "--save-path", str(tmp_path / "prompts"))  # fmt: skip
    assert call(capsys, *prepare)[0] == 0
    own = ("regenerate", "--verifier-name-or-path", name, "--dtype", "float32", "--data-path",
           str(tmp_path / "prompts"), "--max-new-tokens", "24")  # fmt: skip
    for folder, more in (("here", ()), ("there", ("--endpoint", server.url, "--concurrency", "8"))):
        code, _, err = call(capsys, *own, "--save-path", str(tmp_path / folder), *more)
        assert code == 0, err
    here, there = (read_examples(tmp_path / folder, "data") for folder in ("here", "there"))
    assert [d.input_ids for d in there] == [d.input_ids for d in here]
    assert [d.targets for d in there] == [d.targets for d in here]
    assert all(len(d.targets) == 2 for d in here if d.finish == "stop")


def test_load_with_aborts_and_preemption_gives_no_wrong_token(
    server: Server, own_text: OwnText, real_verifier: CausalVerifier
) -> None:
    sampling = SamplingSettings(max_new_tokens=64, ignore_eos=True)
    # Shorter prompts, of lengths that lie on both sides of a block's end; any tokens will do.
    prompts = [prompt[-length:] for prompt, length in zip(own_text.prompts, (32, 61, 90, 65, 33, 37), strict=True)]
    plain = [reply.tokens for reply in DecodingEngine(real_verifier, None, 0, sampling).generate(prompts, 6)]
    draw = random.Random(0)
    jobs = []
    for number in range(200):
        which = draw.randrange(len(prompts))
        limit = draw.choice([1, 3, 6, 12, 20]) if number % 8 else 64
        abort = number % 5 == 0 and limit > 6
        jobs.append((which, limit, abort))

    def ask(job: tuple[int, int, bool]) -> list[int]:
        which, limit, abort = job
        with EngineClient(server.url) as client:
            if not abort:
                return client.complete(prompts[which], [], max_tokens=limit, temperature=0, ignore_eos=True).tokens
            tokens: list[int] = []
            stream = client.stream(prompts[which], [], max_tokens=limit, temperature=0, ignore_eos=True)
            for piece in stream:
                tokens += piece
                if len(tokens) > 4:
                    stream.close()  # the client hangs up in mid-stream
                    break
            return tokens

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, jobs))
    for (which, limit, abort), tokens in zip(jobs, answers, strict=True):
        assert tokens == plain[which][: len(tokens)]
        assert len(tokens) == limit or (abort and len(tokens) > 4)
    assert sum(abort for _, _, abort in jobs) > 5
    assert server.gauge("num_preemptions_total") > 0
    with EngineClient(server.url) as client:  # alive, and right
        last = client.complete(prompts[0], [], max_tokens=9, temperature=0, ignore_eos=True)
    assert last.tokens == plain[0][:9]
    assert server.gauge("num_requests_running") == server.gauge("num_requests_waiting") == 0
    assert server.gauge("kv_cache_usage_perc") == 0  # no block is left behind


def test_a_server_that_dies_while_loading_is_reported_in_a_line(server: Server) -> None:
    port = free_port()
    command = [*BLOCKDRAFT, "serve", str(server.checkpoint.folder), "--port", str(port), "--max-model-len", "99999999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("blockdraft: vLLM ended by itself: ValidationError: User-specified max_model_len (99999999)")
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"--port {port}" in " ".join(p.info["cmdline"] or [])]


def test_the_end_is_clean(server: Server) -> None:
    """Last: SIGTERM ends the command, the server and its engine, with exit code 0."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) > 1
    assert stop(server.process) == 0
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
