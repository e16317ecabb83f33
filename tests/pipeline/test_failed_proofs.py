"""A proof that fails exits 1, says what was not proved, and has it in its JSON; the same proof exits 0 without a fault.

Whatever the draft says, greedy decoding gives the verifier's text; what can break it is the verifier's cached path. It
is broken here for passes over several tokens behind a prompt, which only decoding with a draft makes, and only while
the engine decodes: the proof at loading would see it otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.checkpoints.store import save_draft
from blockdraft.cli.main import run
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.models.block_draft import BlockDraft
from blockdraft.pipeline import evaluate
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import contract_of, tiny_config, tiny_draft, tiny_verifier_of
from pipeline.draft_server import draft_server

K = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalVerifier, BlockDraft]:
    root = tmp_path_factory.mktemp("proofs")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    assert isinstance(verifier, CausalVerifier)
    draft = tiny_draft(verifier, tiny_config("dflash"))
    save_draft(root / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    prompts = [{"prompt": f"w{i} w{i + 1} w{2 * i}"} for i in range(3)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return root, verifier, draft


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    extend, generate = CausalVerifier.extend, DecodingEngine.generate

    def shifted(self: Any, cache: Any, tokens_RW: torch.Tensor, target_layer_ids: Any) -> Any:
        states = extend(self, cache, tokens_RW, target_layer_ids)
        if tokens_RW.shape[1] == 1 or not cache.kv.longest:
            return states
        return dataclasses.replace(states, final=states.final.roll(1, dims=1))

    def decoding(self: Any, *arguments: Any, **named: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CausalVerifier, "extend", shifted)
            return generate(self, *arguments, **named)

    monkeypatch.setattr(DecodingEngine, "generate", decoding)


def outcome(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run([*(str(word) for word in words), "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    return code, json.loads(captured.out)


def evaluation(root: Path) -> tuple[object, ...]:
    return ("evaluate", root / "draft", "--data-path", root / "prompts.jsonl", "--k", K, "--decode",
            "--max-new-tokens", 16, "--dtype", "float32")  # fmt: skip


def comparison(root: Path, url: str) -> tuple[object, ...]:
    return ("parity", root / "draft", "--endpoint", url, "--data-path", root / "prompts.jsonl", "--k", K,
            "--max-new-tokens", 16, "--dtype", "float32")  # fmt: skip


def quickstart(root: Path, folder: Path) -> tuple[object, ...]:
    return (
        "quickstart",
        "--verifier-name-or-path",
        root / "verifier",
        "--save-path",
        folder,
        "--dtype",
        "float32",
        "--workload",
        "chat",
        "--minutes",
        0.01,
        "--max-prompts",
        16,
        "--max-heldout",
        2,
        "--max-new-tokens",
        10,
    )


def test_evaluate(pair: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = outcome(capsys, *evaluation(pair[0]))
    assert code == 0 and result["failures"] == []


@pytest.mark.usefixtures("broken")
def test_evaluate_of_a_broken_verifier(pair: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = outcome(capsys, *evaluation(pair[0]))
    assert code == 1
    assert any("replies with the draft are not the verifier's own" in line for line in result["failures"])
    assert all(line.startswith(f"K={K}: ") for line in result["failures"])
    assert run([str(word) for word in evaluation(pair[0])]) == 1
    assert "not proved: K=3: " in capsys.readouterr().out


@pytest.mark.usefixtures("broken")
def test_quickstart_of_a_broken_verifier(
    pair: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when its stages were done before."""
    for _ in range(2):
        code, result = outcome(capsys, *quickstart(pair[0], tmp_path / "run"))
        assert code == 1
        assert any(line.startswith("float32: ") for line in result["failures"])
    assert result["identical"] < result["heldout_prompts"]


def test_rounds_that_one_pass_does_not_predict_are_a_failure(
    pair: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is right, but one pass over it has other proposals than decoding had."""
    states, forward = CausalVerifier.states, evaluate.one_pass_acceptance

    def other_taps(self: Any, *arguments: Any) -> Any:
        return [dataclasses.replace(each, taps=each.taps.flip(-1)) for each in states(self, *arguments)]

    def one_pass(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(CausalVerifier, "states", other_taps)
            return forward(*arguments)

    monkeypatch.setattr(evaluate, "one_pass_acceptance", one_pass)
    code, result = outcome(capsys, *evaluation(pair[0]))
    assert code == 1 and result["decoding"][str(K)]["identical"] == 3
    assert any("took other rounds than one pass predicts" in line for line in result["failures"])


@pytest.mark.parametrize("wrong", [False, True])
def test_parity_with_a_server(
    pair: tuple[Path, CausalVerifier, BlockDraft], wrong: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    root, verifier, draft = pair
    with draft_server(verifier, draft, K, wrong) as url:
        code, result = outcome(capsys, *comparison(root, url))
    assert code == int(wrong)
    assert bool(result["failures"]) == bool(result["mismatches"]) == wrong
    if wrong:
        assert "text of the vllm engine at position" in result["failures"][0]


@pytest.mark.usefixtures("broken")
def test_parity_of_a_broken_reference_engine(
    pair: tuple[Path, CausalVerifier, BlockDraft], capsys: pytest.CaptureFixture[str]
) -> None:
    root, verifier, draft = pair
    with draft_server(verifier, draft, K) as url:  # which is broken in the same way, so that nobody can be right
        assert run([str(word) for word in comparison(root, url)]) == 1
    assert "not proved: K=3: prompt 1, text of the reference engine" in " ".join(capsys.readouterr().out.split())
