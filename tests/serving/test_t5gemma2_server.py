"""T5Gemma 2 behind `blockdraft serve`: texts and chats over HTTP, parity, and what is answered with an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest

from assets.fixtures import LONGEST, SmallDraft
from assets.t5gemma2 import Asset
from blockdraft.decoding.engine import Reply
from blockdraft.serving.client import EngineClient
from blockdraft.serving.launcher import Launch
from blockdraft.serving.processes import running
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from conftest import call, free_port

pytestmark = [pytest.mark.asset, pytest.mark.engine]

BLOCKDRAFT = (sys.executable, "-m", "blockdraft.cli.main")
REQUESTS = 6


@dataclass
class Server:
    url: str
    record: Path

    def post(self, path: str, **body: object) -> httpx.Response:
        with EngineClient(self.url) as client:
            model = client.model
        body = {"model": model, "temperature": 0, "max_tokens": LONGEST, **body}
        return httpx.post(f"{self.url}/v1/{path}", json=body, trust_env=False, timeout=300)


@pytest.fixture(scope="module")
def server(small_trained_draft: SmallDraft, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    record = folder / "blocks.jsonl"
    command = [*BLOCKDRAFT, "serve", str(small_trained_draft.folder), "--dtype", "float32", "--port", str(port),
               "--record", str(record), "--max-num-seqs", str(REQUESTS), "--max-model-len", "128"]  # fmt: skip
    plan = Launch(command, {}, "", f"http://127.0.0.1:{port}")
    with running(plan, folder / "log.txt"):
        yield Server(plan.url, record)


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
    assert result["faults"] == 0 and result["k"]["7"]["blocks_recorded"]
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
