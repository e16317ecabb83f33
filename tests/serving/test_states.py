"""Hidden states from a real vLLM server, over a shared folder or HTTP: those of this process, and runs on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from safetensors.torch import load_file

from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.serving.client import wait_until_ready
from blockdraft.serving.processes import stop
from blockdraft.training import engine_states
from blockdraft.training.engine_states import EngineStates, Patience
from blockdraft.training.hidden_states import InProcess
from blockdraft.verifiers.parts import read_parts
from conftest import call, free_port, own_replies
from serving.fixtures import Speaker

pytestmark = pytest.mark.engine

BLOCKDRAFT = (sys.executable, "-m", "blockdraft")
# Steps of 64 tokens: longer prompts are computed in chunks, and several requests share a step.
ENGINE = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "320", "--max-num-batched-tokens", "64")
TAPS = (0, 2, 3)


def example_of(length: int, seed: int, start: tuple[int, ...] = ()) -> Example:
    generator = torch.Generator().manual_seed(seed)
    ids = [*start, *torch.randint(3, 96, (length - len(start),), generator=generator).tolist()]
    return Example.of_reply(f"doc{seed}", ids[:2], ids[2:], "length")


PREFIX = tuple(example_of(140, 7).input_ids)
EXAMPLES = [example_of(3 + 37 * i % 150, i) for i in range(1, 14)] + [example_of(200, 50 + i, PREFIX) for i in range(4)]


@pytest.fixture(scope="module")
def server(random_speaker: Speaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("states"), free_port()
    command = [*BLOCKDRAFT, "serve", str(random_speaker.folder), "--extract", "--dtype", "float32", "--port", str(port),
               "--states-port", str(free_port()), "--target-layer-ids", *map(str, (0, 1, 2, 3)),
               "--hidden-states-path", str(folder), "--threads", "1", *ENGINE]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until_ready(url, lambda: process.poll() is None, 300)
        yield url
    finally:
        stop(process)
        left = [path.name for path in folder.iterdir()]
    assert left == ["log.txt"]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("transport", ["folder", "http"])
def test_states_are_those_of_this_process(
    server: str, random_speaker: Speaker, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At concurrency 8, with chunked prefill and shared prefixes, asked for twice."""
    if transport == "http":  # as on a machine without the server's disk
        monkeypatch.setattr(engine_states, "FOLDER_ID", ".elsewhere")
    verifier = read_parts(str(random_speaker.folder), torch.float32, "cpu")
    provider = EngineStates([server], verifier, TAPS, with_final=True, patience=Patience(workers=8))
    assert provider.available(EXAMPLES) == EXAMPLES
    wanted = InProcess(random_speaker.verifier, TAPS, with_final=True).get(EXAMPLES)
    for _ in range(2):
        for example, found, right in zip(EXAMPLES, provider.get(EXAMPLES), wanted, strict=True):
            for tap in range(len(TAPS)):
                close(found.taps[:, tap], right.taps[:, tap])
            assert found.final is not None and right.final is not None
            close(found.final, right.final)
            assert torch.equal(found.greedy, right.greedy), example.id
    provider.close()


def test_what_does_not_fit_is_one_line(server: str, random_speaker: Speaker) -> None:
    parts = {dtype: read_parts(str(random_speaker.folder), dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)}
    cases = [
        (EngineStates([server], parts[torch.bfloat16], TAPS), EXAMPLES, "float32, and training is in bfloat16"),
        (EngineStates([server], parts[torch.float32], TAPS), [example_of(320, 1)], "has no room for a text of 320"),
    ]
    for provider, examples, says in cases:
        with pytest.raises(InputError, match=says):
            provider.available(examples)


def test_names_that_are_no_files_of_states_are_not_given(server: str) -> None:
    answer = httpx.post(f"{server}/v1/completions", trust_env=False, timeout=60, json={
        "model": httpx.get(f"{server}/v1/models", trust_env=False).json()["data"][0]["id"], "prompt": [5, 6, 7],
        "max_tokens": 1})  # fmt: skip
    facts = answer.json()["kv_transfer_params"]
    url = f"http://127.0.0.1:{facts['states_port']}"
    name = Path(facts["hidden_states_path"]).name
    with ThreadPoolExecutor() as pool:
        statuses = list(pool.map(lambda path: httpx.get(url + path, trust_env=False, timeout=60).status_code,
                                 [f"/{name}", "/../log.txt", "/.blockdraft-states", "/x.safetensors"]))  # fmt: skip
    assert statuses == [200, 404, 404, 404]
    assert httpx.delete(f"{url}/{name}", trust_env=False).status_code == 204
    assert not Path(facts["hidden_states_path"]).exists()


def test_files_that_nobody_fetches_do_not_fill_the_folder(tmp_path: Path) -> None:
    from blockdraft.vllm_plugin.states_connector import drop_oldest

    for age in range(6):
        path = tmp_path / f"{age}.safetensors"
        path.touch()
        os.utime(path, (age, age))
    (tmp_path / "other.txt").touch()
    drop_oldest(tmp_path, most=4)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["2", "3", "4", "5", "other"]


def test_a_run_on_a_server_is_the_run_in_process(
    server: str, random_speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line, states asked for ahead of the step, nothing kept in memory; and files that a server fills."""
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    own_replies(random_speaker.verifier, f"s={tmp_path / 'prompts.jsonl'}", tmp_path / "p", tmp_path / "data", 24)
    more = {
        "here": (), "there": ("--vllm-endpoint", server, "--prefetch", 3, "--num-workers", 8),
        "filed": ("--vllm-endpoint", server, "--hidden-states-path", tmp_path / "states"),
    }  # fmt: skip
    weights = {}
    for name, flags in more.items():
        code, out, err = call(
            capsys, "train", "--verifier-name-or-path", random_speaker.folder, "--dtype", "float32", "--threads", 1,
            "--data-path", tmp_path / "data", "--save-path", tmp_path / name, "--target-layer-ids", 0, 2, 3,
            "--mask-token-id", 500, "--epochs", 3, "--total-seq-len", 80, "--num-layers", 1, "--logger", "none",
            "--states-memory-gib", 0, "--json", *flags,
        )  # fmt: skip
        assert code == 0, err
        weights[name] = load_file(Path(json.loads(out)["checkpoint"]) / "model.safetensors")
    for name in ("there", "filed"):
        for tensor, right in weights["here"].items():
            apart = (weights[name][tensor] - right).norm() / right.norm()
            assert float(apart) < 0.05, (name, tensor)  # Muon makes much of small differences
    assert len(list((tmp_path / "states").glob("*/*.safetensors"))) == len(prompts)
    # What a server says of the draft is what this process says, to near-ties of a random verifier.
    found = {}
    for place, flags in (("here", ()), ("there", ("--vllm-endpoint", server))):
        code, out, err = call(
            capsys, "evaluate", tmp_path / "there" / "checkpoint_best", "--dtype", "float32", "--threads", 1,
            "--data-path", tmp_path / "prompts.jsonl", "--max-new-tokens", 24, "--k", 3, 7, "--json", *flags,
        )  # fmt: skip
        assert code == 0, err
        result = json.loads(out)
        found[place] = (result["reply_tokens"], result["disagreements"], result["acceptance"])
    assert found["here"] == found["there"] and found["here"][0] > 100 and found["here"][1] == 0
