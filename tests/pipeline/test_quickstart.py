"""Quickstart: stages that are not repeated, stops that lose nothing, settings that are never answered stale; and the
real thing, small: SmolLM2-135M-Instruct through the command line, killed once in the middle of training."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockdraft.cli.tables import next_commands, show_quickstart
from blockdraft.data.table import read_examples
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.files import write_json
from blockdraft.pipeline import quickstart as module
from blockdraft.pipeline.evaluate import one_pass
from blockdraft.pipeline.loading import encode_all, load_pair
from blockdraft.settings import CheckpointSettings, QuickstartSettings, SamplingSettings
from blockdraft.verifiers.loading import save_folder
from conftest import call, tiny_verifier_of

KEYS = {"verifier", "method", "acceptance_length", "speedup", "identical", "heldout_prompts", "checkpoint"}


@pytest.fixture(scope="module")
def tiny_settings(tmp_path_factory: pytest.TempPathFactory) -> QuickstartSettings:
    root = tmp_path_factory.mktemp("quickstart")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    return QuickstartSettings(
        verifier_name_or_path=str(root / "verifier"), save_path=root / "run", dtype="float32", workload="chat",
        minutes=0.01, max_prompts=24, max_heldout=3, max_new_tokens=12,
    )  # fmt: skip


@pytest.mark.slow
def test_finished_stages_are_not_repeated_and_changes_are_not_answered_stale(
    tiny_settings: QuickstartSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = module.quickstart(tiny_settings)
    assert result.keys() >= KEYS
    assert result["identical"] == result["heldout_prompts"] == 3
    assert result["float32"]["same_rounds_as_one_pass"] == 3
    show_quickstart(result)
    assert "token-identical" in capsys.readouterr().out
    assert Path(result["card"]).read_text().startswith("---")  # written while `check` finds nothing
    assert len(next_commands(result)) == 3
    # The example is of what the draft was trained on, and what is asked is shown.
    command = shlex.split(next_commands(result)[0])
    code, out, err = call(capsys, *command[command.index("generate") :], "--max-new-tokens", "12")
    assert code == 0, err
    asked = workload_prompts(tiny_settings.workload)[1][0][-1]["content"]
    assert "".join(asked.split()) in "".join(out.split())

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a finished stage was repeated")

    with monkeypatch.context() as patch:
        patch.setattr(DecodingEngine, "generate", forbidden)
        patch.setattr(module, "train", forbidden)
        assert module.quickstart(tiny_settings) == json.loads(json.dumps(result))

    made = set(tiny_settings.save_path.iterdir())
    for change in ({"method": "dflare"}, {"minutes": 0.02}, {"seed": 1}, {"max_prompts": 20}, {"max_new_tokens": 9}):
        other = module.quickstart(dataclasses.replace(tiny_settings, **change))
        assert other["checkpoint"] != result["checkpoint"], change
        now = set(tiny_settings.save_path.iterdir())
        new_data = any(path.name.startswith("data-") for path in now - made)
        assert new_data == ("max_prompts" in change or "max_new_tokens" in change)
        made = now
    fewer = module.quickstart(dataclasses.replace(tiny_settings, max_heldout=2))
    assert fewer["checkpoint"] == result["checkpoint"] and fewer["heldout_prompts"] == 2
    assert set(tiny_settings.save_path.iterdir()) == made


REAL = {"max_prompts": 64, "max_heldout": 6}
EPOCHS = 3.0


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "blockdraft.cli.main", "quickstart", "--save-path", str(folder), "--json"]
    command += ["--max-prompts", str(REAL["max_prompts"]), "--max-heldout", str(REAL["max_heldout"])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Quickstart on the real verifier, sent SIGTERM while it trains and then started again.

    As a run that was stopped earlier would have left it, the plan is there: the draft is the same on any machine.
    """
    folder = tmp_path_factory.mktemp("real")
    run = module.run_of(QuickstartSettings(save_path=folder, **REAL))
    write_json(run.plan, {"seconds_per_step": 1.0, "epochs": EPOCHS})
    process = start(folder)
    assert process.stderr is not None
    for line in process.stderr:
        if re.match(r"training: \d+ steps", line):
            break
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "the same command goes on from there" in said and "Traceback" not in said
    process = start(folder)
    out, err = process.communicate(timeout=1500)
    assert process.returncode == 0, err
    assert "done before" in err and re.search(r"resuming after step [1-9]", err)
    return json.loads(out), err


@pytest.mark.real
def test_real_quickstart(real_run: tuple[dict, str]) -> None:
    result, _ = real_run
    assert result.keys() >= KEYS
    assert set(result["acceptance_length"]) == {"3", "7"}
    assert result["verifier"] == "smollm2-135m-instruct" and result["method"] == QuickstartSettings().method
    assert result["identical"] == result["heldout_prompts"] == 6
    assert result["float32"]["same_rounds_as_one_pass"] == 6
    assert result["served_dtype"]["mismatches"] == 0
    # A few epochs of 64 prompts: far from what the draft can do, and far above an untrained one.
    assert result["acceptance_length"]["7"] > 1.3
    (data,) = Path(result["checkpoint"]).parent.parent.glob("data-*")
    replies = read_examples(data, "data")
    assert len(replies) == 64 and replies.column("finish").count("stop") > 60


@pytest.mark.real
def test_one_pass_equals_decoding_for_every_k_on_all_heldout_prompts(real_run: tuple[dict, str]) -> None:
    """One pass gives the rounds of every prompt at every K; decoding takes one K a prompt, all of them in turn."""
    pair = load_pair(CheckpointSettings(checkpoint=Path(real_run[0]["checkpoint"]), dtype="float32"))
    prompts = encode_all(pair.verifier, workload_prompts("records")[1])
    assert len(prompts) == 40
    sampling = SamplingSettings(max_new_tokens=48)  # shorter than some replies and longer than others
    plain = DecodingEngine(pair.verifier, None, 0, sampling).generate(prompts, 20)
    predicted = one_pass(pair, plain, range(1, 8))
    assert sum(outcome.disagreements for outcome in predicted) == 0
    for k in range(1, 8):
        some = slice(k - 1, None, 7)
        drafted = DecodingEngine(pair.verifier, pair.draft, k, sampling).generate(prompts[some], 6)
        assert [reply.tokens for reply in drafted] == [reply.tokens for reply in plain[some]], f"K={k}"
        assert [reply.rounds for reply in drafted] == [outcome.rounds[k] for outcome in predicted[some]], f"K={k}"


@pytest.mark.real
def test_a_draft_of_this_verifier_is_refused_by_another(
    real_run: tuple[dict, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = real_run
    save_folder(tiny_verifier_of("llama"), tmp_path / "tiny")
    evaluate = ("evaluate", result["checkpoint"], "--verifier-name-or-path", tmp_path / "tiny")
    code, _, err = call(capsys, *evaluate)
    assert code == 2 and err.count("\n") == 1
    assert "verifier hidden_size: the draft was trained for 576" in err


@pytest.mark.real
def test_tensors_of_a_projected_draft_are_stock_dflash(real_run: tuple[dict, str]) -> None:
    """What stock vLLM 0.32 looks for is there, and nothing that it would not know."""
    from safetensors import safe_open

    checkpoint = Path(real_run[0]["checkpoint"])
    config = json.loads((checkpoint / "config.json").read_text())
    if config["speculators_model_type"] != "dflash":
        pytest.skip("the default method is not DFlash")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("fc.weight").shape == torch.Size([576, 576 * len(config["aux_hidden_state_layer_ids"])])
    per_layer = {"input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj"}
    per_layer |= {"self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm"}
    per_layer |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    layers = config["transformer_layer_config"]["num_hidden_layers"]
    wanted = {f"layers.{i}.{name}.weight" for i in range(layers) for name in per_layer}
    assert names == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert config["sliding_window_non_causal"] is True  # false would make every layer causal in vLLM 0.32
