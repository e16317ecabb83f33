"""T5Gemma 2 behind `blockdraft serve`: texts and chats over HTTP, parity, and what is answered with an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from assets.fixtures import LONGEST, SmallDraft
from assets.t5gemma2 import Asset
from blockdraft.decoding.engine import Reply
from blockdraft.serving.client import EngineClient
from blockdraft.serving.launcher import Launch
from blockdraft.serving.processes import running
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from conftest import call, free_port
from serving.odd_requests import bodies, fuzz, prompts

pytestmark = [pytest.mark.asset, pytest.mark.engine]

BLOCKDRAFT = (sys.executable, "-m", "blockdraft.cli.main")
REQUESTS = 6


@dataclass
class Server:
    url: str
    record: Path
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, path: str, **body: object) -> httpx.Response:
        with EngineClient(self.url) as client:
            model = client.model
        body = {"model": model, "temperature": 0, "max_tokens": LONGEST, **body}
        return httpx.post(f"{self.url}/v1/{path}", json=body, trust_env=False, timeout=300)


def without_start(verifier: Path, folder: Path) -> Path:
    """The verifier with nothing to say what a decoder begins with, but for the decoder's own BOS."""
    copy = Path(shutil.copytree(verifier, folder / "verifier"))
    for name, field in (("tokenizer_config.json", "bos_token"), ("generation_config.json", "decoder_start_token_id")):
        stated = json.loads((copy / name).read_text())
        del stated[field]
        (copy / name).write_text(json.dumps(stated))
    return copy


@pytest.fixture(scope="module")
def server(
    small_trained_draft: SmallDraft, small_asset: Asset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    verifier = without_start(small_asset.verifier, folder)
    port = free_port()
    record = folder / "blocks.jsonl"
    command = [*BLOCKDRAFT, "serve", str(small_trained_draft.folder), "--verifier-name-or-path", str(verifier),
               "--dtype", "float32", "--port", str(port), "--record", str(record), "--max-num-seqs", str(REQUESTS),
               "--max-model-len", "128"]  # fmt: skip
    plan = Launch(command, {}, "", f"http://127.0.0.1:{port}")
    with running(plan, folder / "log.txt") as process:
        yield Server(plan.url, record, process, folder / "log.txt")


@pytest.fixture(scope="module")
def texts(small_asset: Asset) -> list[str]:
    return [json.loads(line)["prompt"] for line in small_asset.heldout.read_text().splitlines()[:REQUESTS]]


def test_texts_and_chats_are_answered_at_once(
    server: Server, texts: list[str], small_verifier: EncoderDecoderVerifier, small_replies: list[Reply]
) -> None:
    wanted = [small_verifier.tokenizer.decode(r.tokens, skip_special_tokens=True) for r in small_replies[:REQUESTS]]
    with ThreadPoolExecutor(REQUESTS) as pool:
        plain = list(pool.map(lambda text: server.post("completions", prompt=text).json(), texts))
        turns = [[{"role": "user", "content": text}] for text in texts]
        chats = list(pool.map(lambda turn: server.post("chat/completions", messages=turn).json(), turns))
    assert [answer["choices"][0]["text"] for answer in plain] == wanted
    assert [answer["choices"][0]["message"]["content"] for answer in chats] == wanted


def test_parity_with_the_running_server(
    server: Server, small_trained_draft: SmallDraft, small_asset: Asset, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(
        capsys, "parity", small_trained_draft.folder, "--dtype", "float32", "--endpoint", server.url, "--record",
        server.record, "--data-path", small_asset.heldout, "--max-prompts", REQUESTS, "--max-new-tokens", LONGEST,
        "--json",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(out)
    lengths = result["k"]["7"]["acceptance_length"]
    assert result["mismatches"] == 0 and result["k"]["7"]["blocks_recorded"]
    assert lengths["vllm"] == lengths["reference"] > 2


@pytest.mark.parametrize(
    ("prompt", "says"), [("a <end_of_image> b", "stands for an image"), ("x" * 3000, "maximum context length")]
)
def test_a_source_that_cannot_be_read_is_refused(server: Server, prompt: str, says: str) -> None:
    answer = server.post("completions", prompt=prompt, max_tokens=4)
    assert answer.status_code == 400 and says in answer.text
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    answer = server.post("chat/completions", messages=[{"role": "user", "content": image}])
    assert answer.status_code == 400


def test_ids_that_are_no_tokens_are_the_clients_mistake(server: Server) -> None:
    """One such id ended the engine for everybody."""
    answer = server.post("completions", prompt=[5, 100_000], max_tokens=4)
    assert answer.status_code == 400 and "token 100000" in answer.text
    assert server.post("completions", prompt=[20, 21], max_tokens=4).status_code == 200


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"stream": True}])
def test_an_echo_is_the_source(server: Server, texts: list[str], small_verifier: Any, more: dict[str, Any]) -> None:
    source = small_verifier.tokenizer(texts[0])["input_ids"]
    for prompt in (texts[0], source):
        answer = server.post("completions", prompt=prompt, echo=True, max_tokens=4, **more)
        assert answer.status_code == 200
        first = json.loads(answer.text.split("data: ")[1]) if more.get("stream") else answer.json()
        assert first["choices"][0]["text"].startswith(texts[0])


def test_no_request_ends_the_server(
    server: Server, small_verifier: EncoderDecoderVerifier, small_replies: list[Reply], texts: list[str]
) -> None:
    images = sorted(small_verifier.image_ids)
    odd = prompts(small_verifier.model.config.decoder.vocab_size, 128, (0, 1, 2, 3, *images))
    usual = [small_verifier.tokenizer(text)["input_ids"] for text in texts]
    sent, wrong = fuzz(server.url, None, bodies(5, odd, usual), float(os.environ.get("BLOCKDRAFT_FUZZ_SECONDS", "20")))
    assert not wrong, "\n".join(wrong)
    assert sent > 60
    answer = server.post("completions", prompt=texts[0]).json()  # alive, and right
    wanted = small_verifier.tokenizer.decode(small_replies[0].tokens, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == wanted


def test_a_killed_engine_is_an_error_with_its_cause(server: Server) -> None:
    """Last: what the system does to a process that takes too much memory."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    engine = next(child for child in children if "EngineCore" in child.name() + " ".join(child.cmdline()))
    engine.kill()
    assert server.process.wait(120) == 1
    last = server.log.read_text().splitlines()[-1]
    cause = "a process of its engine ended unexpectedly (out of memory, or killed)"
    assert last == f"blockdraft: vLLM ended by itself: {cause}"
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
