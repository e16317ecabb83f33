"""The command of the published Gemma 4 31B draft, its recipe, from data to a draft that is proved: all of it, but tiny.

Only verifier, data, processes and sizes are others: states come from a live server, two processes divide the draft,
one of them is killed, and the run goes on to the same bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft.serving.client import wait_until_ready
from blockdraft.serving.processes import stop
from blockdraft.training.run_folder import BEST, LAST
from conftest import call, free_port, own_replies
from serving.fixtures import Speaker
from training.launching import BROKEN_OFF, ran, torchrun

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALLER = ("--target-layer-ids", 1, 2, 4, "--total-seq-len", 128, "--max-anchors", 24, "--sliding-window", 16,
           "--mask-token-id", 500, "--dtype", "float32", "--threads", 1)  # fmt: skip


@pytest.fixture(scope="module")
def endpoint(random_speaker: Speaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One request at a time: what is computed together decides on the last bits."""
    folder, port = tmp_path_factory.mktemp("extract"), free_port()
    command = [sys.executable, "-m", "blockdraft", "serve", random_speaker.folder, "--extract", "--dtype", "float32",
               "--target-layer-ids", 1, 2, 4, "--port", port, "--states-port", free_port(), "--threads", 1,
               "--enforce-eager", "--max-num-seqs", 1, "--max-model-len", 256]  # fmt: skip
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([str(each) for each in command], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, lambda: process.poll() is None, 300)
        yield url
    finally:
        stop(process)


def test_the_published_run_of_gemma_4(
    endpoint: str, random_speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    own_replies(random_speaker.verifier, f"s={tmp_path / 'prompts.jsonl'}", tmp_path / "p", tmp_path / "data", 48)
    (tmp_path / "broken_off.py").write_text(BROKEN_OFF)

    def run(name: str) -> list[str]:
        arguments = ["train", "--config", "gemma-4-31b-it.dflash", "--verifier-name-or-path", random_speaker.folder,
                     "--data-path", tmp_path / "data", "--save-path", tmp_path / name, "--vllm-endpoint", endpoint,
                     *SMALLER]  # fmt: skip
        return [str(each) for each in arguments]

    code, _, err = ran(torchrun(2, "-m", "blockdraft", *run("whole")))
    assert code == 0, err
    for who, when in ((1, 4), (0, 9)):
        code, _, err = ran(torchrun(2, tmp_path / "broken_off.py", "SIGKILL", who, when, *run("killed")))
        assert code == 1, err
    code, _, err = ran(torchrun(2, "-m", "blockdraft", *run("killed")))
    assert code == 0 and "resuming after step" in err, err
    for name in (BEST, LAST):
        whole, killed = (tmp_path / run_ / name / "model.safetensors" for run_ in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    assert list((tmp_path / "whole" / "logs").rglob("events.*"))
    code, out, err = call(
        capsys, "parity", tmp_path / "killed" / BEST, "--dtype", "float32", "--data-path", tmp_path / "prompts.jsonl",
        "--max-prompts", 4, "--max-new-tokens", 40, "--threads", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["failures"] == []
