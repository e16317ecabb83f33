"""Several processes against one: the same curve, the same weights, and the same end wherever a run is broken off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.training.processes import ALONE
from blockdraft.training.run_folder import BEST, LAST
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import call, free_port, own_replies, tiny_verifier_of
from training.launching import BROKEN_OFF, ENVIRONMENT, ran, torchrun

SCRIPT = Path(__file__).parent / "together.py"


# --- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_two_processes_train_as_one_does(tmp_path: Path, method: str) -> None:
    """As one process with twice the rows a step: copied and sharded, with an uneven last step."""
    optimizer = "adamw" if method == "dflare" else "muon"
    runs = {"one": (1, "copied", 4), "copied": (2, "copied", 2), "sharded": (2, "sharded", 2)}
    curves, weights = {}, {}
    for name, (count, kind, accum) in runs.items():
        (tmp_path / name).mkdir()
        arguments = [str(SCRIPT), str(tmp_path / name), method, optimizer, kind, str(accum)]
        command = torchrun(count, *arguments) if count > 1 else [sys.executable, *arguments]
        code, _, err = ran(command)
        assert code == 0, err
        curves[name] = json.loads((tmp_path / name / "curve.json").read_text())
        weights[name] = load_file(tmp_path / name / "run" / LAST / "model.safetensors")
    wanted = curves["one"]
    assert len(wanted["curve"]) >= 3
    for name in ("copied", "sharded"):
        for (loss, _, slots), (right, _, right_slots) in zip(curves[name]["curve"], wanted["curve"], strict=True):
            assert loss == pytest.approx(right, rel=1e-5) and slots == right_slots
        assert curves[name]["history"] == pytest.approx(wanted["history"], rel=0.02)
        for tensor, value in weights[name].items():
            apart = (value - weights["one"][tensor]).norm() / weights["one"][tensor].norm().clamp_min(1e-6)
            assert float(apart) < 0.1, tensor  # Muon makes much of small differences; other weights are 1.4 apart
    assert [entry[0] for entry in curves["copied"]["curve"]] == pytest.approx(
        [entry[0] for entry in curves["sharded"]["curve"]], rel=1e-5
    )


# --- the command line -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier's folder, its own replies to a few prompts, and a script that breaks off in the middle."""
    root = tmp_path_factory.mktemp("together")
    verifier = tiny_verifier_of("llama")
    save_folder(verifier, root / "verifier")
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    own_replies(load_verifier(str(root / "verifier"), torch.float32), f"s={root / 'prompts.jsonl'}", root / "prompts",
                root / "data", 16)  # fmt: skip
    (root / "broken_off.py").write_text(BROKEN_OFF)
    return root


def train(workshop: Path, folder: Path, *more: object) -> list[str]:
    arguments = [
        "train", "--verifier-name-or-path", workshop / "verifier", "--dtype", "float32", "--threads", 1,
        "--data-path", workshop / "data", "--num-taps", 2, "--logger", "none", "--epochs", 4, "--total-seq-len", 40,
        "--checkpoint-freq", 0.5, "--save-path", folder / "run", *more,
    ]  # fmt: skip
    return [str(each) for each in arguments]


def weights(folder: Path) -> bytes:
    return (folder / "run" / BEST / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["copied", "sharded"])
def test_whatever_breaks_a_run_off_it_goes_on_to_the_same_bits(workshop: Path, tmp_path: Path, kind: str) -> None:
    """Stopped by a signal to one process, killed, and ended by another's error."""
    more = ("--fsdp-shard",) if kind == "sharded" else ()
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    script = workshop / "broken_off.py"
    code, out, err = ran(torchrun(2, "-m", "blockdraft", *train(workshop, tmp_path / "whole", *more, "--json")))
    assert code == 0, err
    result = json.loads(out)  # one process shows what all came to
    assert result["steps"] >= 6
    endings = {("SIGTERM", 1, 1): "stopped after step 2", ("SIGKILL", 1, 3): "", ("error", 1, 4): "out of luck"}
    for (how, who, when), says in endings.items():
        command = torchrun(2, script, how, who, when, *train(workshop, tmp_path / "broken", *more))
        code, _, err = ran(command)
        assert code == 1 and says in err, err
        if how == "error":
            assert "rank 1: blockdraft: out of luck" in err
            assert "rank 0: blockdraft: another process of this run ended" in err or "SIGTERM" in err
    code, _, err = ran(torchrun(2, "-m", "blockdraft", *train(workshop, tmp_path / "broken", *more)))
    assert code == 0 and err.count("resuming after step") == 1, err
    assert weights(tmp_path / "whole") == weights(tmp_path / "broken")
    state = json.loads((tmp_path / "whole" / "run" / BEST / "training_state.json").read_text())
    assert state["world_size"] == 2


def test_two_machines_and_then_one_process(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two agents of one process each, over loopback; another number of processes goes on, and says so."""
    port = free_port()
    script = [workshop / "broken_off.py", "SIGTERM", 0, 2, *train(workshop, tmp_path, "--fsdp-shard")]
    agents = [
        subprocess.Popen(
            torchrun(1, *script, nodes=(2, node, port)), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    said = "".join(agent.communicate(timeout=300)[1] for agent in agents)
    assert [agent.returncode for agent in agents] == [1, 1] and "stopped after step 3" in said, said
    code, _, err = call(capsys, *train(workshop, tmp_path))
    assert code == 0 and "the run had 2 rows a step and has 1 now, in 1 processes: it goes on after step 6" in err, err


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["check", "nowhere"], {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun: 2 processes: only `blockdraft train` runs"),
        (["check", "nowhere"], {"RANK": "2", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE: 2 and 2: start several"),
        (["check", "nowhere"], {"RANK": "a", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE: a and 2: start several"),
    ],
)
def test_what_is_not_for_several_processes_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    environment: dict[str, str], says: str,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = call(capsys, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1 and not out, err


def test_one_process_has_nobody_to_divide_a_draft_with(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, *train(workshop, tmp_path, "--fsdp-shard"))
    assert code == 2 and "--fsdp-shard: True: divides a draft among processes; start several by torchrun" in err


def test_one_process_sends_nothing() -> None:
    values = (1, 2.5, torch.ones(2), None)
    assert ALONE.summed(values) is values and not ALONE.any(False) and ALONE.share([1, 2]) == [1, 2]
    assert [float(t) for t in ALONE.in_turns([torch.ones(()), torch.zeros(())], lambda t: t + 1)] == [2, 1]
