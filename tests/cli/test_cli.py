"""The command line: help, exit codes, one line for a mistake, nothing half-written."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blockdraft.checkpoints.store import save_draft
from blockdraft.cli import tables
from blockdraft.cli.flags import list_flags, present_names, spread_lists
from blockdraft.cli.verbs import VERBS
from blockdraft.errors import InputError
from blockdraft.pipeline.prepare import prepare as prepare_data
from blockdraft.settings import GenerateSettings, PrepareSettings, TrainSettings, build, identity, resolved
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import call, contract_of, tiny_config, tiny_draft, tiny_verifier_of


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny verifier, a draft for it, prompts, and a verifier that the draft does not fit."""
    root = tmp_path_factory.mktemp("cli")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    save_folder(tiny_verifier_of("qwen3"), root / "stranger")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    draft = tiny_draft(verifier, tiny_config("dflare"))
    save_draft(root / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    prepare = PrepareSettings(
        verifier_name_or_path=str(root / "verifier"), source=(f"s={root / 'prompts.jsonl'}",), prompts_only=True,
        save_path=root / "prompts", train_data_ratio=0.7,
    )  # fmt: skip
    prepare_data(prepare)
    (root / "empty.jsonl").write_text("\n")
    (root / "long.jsonl").write_text(json.dumps({"prompt": "w5 " * 400}))
    return root


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_defaults(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0
    assert "Examples" in out and f"blockdraft {verb}" in " ".join(out.split())
    assert "default:" in out or verb == "convert"


@pytest.mark.slow
def test_the_whole_chain_by_commands(capsys: pytest.CaptureFixture[str], workshop: Path, tmp_path: Path) -> None:
    verifier = ("--verifier-name-or-path", workshop / "verifier", "--dtype", "float32")
    code, out, err = call(
        capsys, "prepare", *verifier[:2], "--source", f"s={workshop / 'prompts.jsonl'}", "--prompts-only",
        "--train-data-ratio", 0.8, "--save-path", tmp_path / "prompts",
    )  # fmt: skip
    assert code == 0 and "12 examples in" in out, err
    code, out, err = call(
        capsys, "regenerate", *verifier, "--data-path", tmp_path / "prompts", "--save-path", tmp_path / "data",
        "--max-new-tokens", 20, "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["documents"] == 12
    train = (
        "train", *verifier, "--data-path", tmp_path / "data", "--save-path", tmp_path / "run", "--epochs", 1.5,
        "--total-seq-len", 64, "--target-layer-ids", 1, 2, 4, "--logger", "none",
    )  # fmt: skip
    code, out, err = call(capsys, *train, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["settings"]["target_layer_ids"] == [1, 2, 4] and not (tmp_path / "run").exists()
    code, out, err = call(capsys, *train)
    assert code == 0, err
    assert "Exact acceptance" in out
    checkpoint = tmp_path / "run" / "checkpoint_best"
    evaluate = ("evaluate", checkpoint, "--data-path", workshop / "prompts.jsonl", "--max-new-tokens", 12)
    code, out, err = call(capsys, *evaluate, "--k", 1, 7, "--decode", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["acceptance"]) == {"1", "7"}
    for proof in result["decoding"].values():
        assert proof["identical"] == proof["same_rounds_as_one_pass"] == 12
        assert proof["mismatches"] == 0
    code, out, err = call(capsys, *evaluate, "--decode")
    assert code == 0 and "acceptance length" in out and "token-identical" in out
    code, out, err = call(capsys, "generate", checkpoint, "w3 w4", "--show-drafts", "--max-new-tokens", 9)
    assert code == 0 and "acceptance length" in out and "accepted by the verifier" in out


def test_sampling_with_a_draft_by_command(capsys: pytest.CaptureFixture[str], workshop: Path) -> None:
    arguments = ("generate", workshop / "draft", "w1", "w2 w3", "--temperature", 0.9, "--seed", 4, "--batch-size", 2)
    results = [json.loads(call(capsys, *arguments, "--max-new-tokens", 8, "--json")[1]) for _ in range(2)]
    tokens = [[reply["tokens"] for reply in result["replies"]] for result in results]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2


_TINY = ("--verifier-name-or-path", "{root}/verifier")
BAD = {
    "unknown flag": (("evaluate", "{draft}", "--nonsense"), "--nonsense"),
    "missing argument": (("evaluate",), "argument CHECKPOINT: missing"),
    "missing flag": (("train", "--data-path", "x"), "--save-path: missing"),
    "not a number": (("evaluate", "{draft}", "--batch-size", "many"), "batch-size"),
    "K of zero": (("evaluate", "{draft}", "--k", "0"), "--k: 0: must be 1 or more"),
    "K too large": (("evaluate", "{draft}", "--k", "8"), "--k: 8: a draft of block size 8 proposes 1 to 7"),
    "generate with K too large": (("generate", "{draft}", "w1", "--k", "9"), "--k: 9"),
    "another verifier": (
        ("evaluate", "{draft}", "--verifier-name-or-path", "{root}/stranger"),
        "verifier architecture: the draft was trained for LlamaForCausalLM",
    ),
    "no checkpoint": (("evaluate", "{root}/nothing"), "checkpoint: {root}/nothing: no such folder"),
    "empty prompt file": (("evaluate", "{draft}", "--data-path", "{root}/empty.jsonl"), "no prompts in it"),
    "prompt too long": (("evaluate", "{draft}", "--data-path", "{root}/long.jsonl"), "context holds 256"),
    "empty prompt": (("generate", "{draft}", " "), "prompt 1: empty"),
    "no prompt": (("generate", "{draft}"), "prompts: none given: pass one of PROMPTS, --data-path, --workload"),
    "prompts from two places": (
        ("generate", "{draft}", "w1", "--workload", "records"),
        "prompts: PROMPTS, --workload: all given: pass one of",
    ),
    "bad dtype": (("evaluate", "{draft}", "--dtype", "float16"), "--dtype: float16: choose one of"),
    "no source": (("prepare", "--save-path", "{out}"), "--source: none: name one"),
    "bad source": (
        ("prepare", "--save-path", "{out}", "--source", "songs=builtin/songs", *_TINY),
        "--workload: songs: choose one of",
    ),
    "no place": (("prepare", "--source", "s=builtin/chat"), "--save-path: missing"),
    "bad thinking": (("prepare", "--source", "s=x", "--preview", "1", "--thinking", "hard"), "--thinking: hard"),
    "data that are none": (
        ("regenerate", "--data-path", "{root}/verifier", "--save-path", "{out}", *_TINY),
        "data_config.json: no such file",
    ),
    "nobody at the endpoint": (
        ("regenerate", "--data-path", "{root}/prompts", "--save-path", "{out}", *_TINY,
         "--endpoint", "http://127.0.0.1:9"),
        "no OpenAI-compatible server answers there",
    ),
    "training on prompts": (
        ("train", "--data-path", "{root}/prompts", "--save-path", "{out}", *_TINY), "run blockdraft regenerate on it"
    ),
    "missing GGUF": (
        ("regenerate", "--verifier-name-or-path", "{root}/no.gguf", "--data-path", "{root}/prompts",
         "--save-path", "{out}"),
        "no such GGUF file",
    ),
    "broken recipe": (("train", "--config", "{root}/prompts.jsonl"), "--config"),
    "bad top-p": (("generate", "{draft}", "w1", "--top-p", "0"), "--top-p: 0.0: must be above 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], workshop: Path, tmp_path: Path, case: str
) -> None:
    arguments, says = BAD[case]
    places = {"draft": str(workshop / "draft"), "root": str(workshop), "out": str(tmp_path / "out")}
    code, out, err = call(capsys, *(argument.format(**places) for argument in arguments))
    assert code == 2
    assert says.format(**places) in err
    assert err.count("\n") == 1 and "Traceback" not in err and not out
    assert not list(tmp_path.iterdir())


def test_recipe_gives_way_to_flags_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data-path: d\nsave_path: s\nlr: 1\ntarget-layer-ids: [1, 2]\nmask_token_id: null\n")
    settings = build(TrainSettings, {"epochs": 3.0, "lr": None}, recipe)
    assert (settings.lr, settings.epochs, settings.target_layer_ids, settings.save_path) == (
        1.0,
        3.0,
        (1, 2),
        Path("s"),
    )
    assert build(TrainSettings, {"lr": 0.5}, recipe).lr == 0.5
    assert json.loads(json.dumps(resolved(settings)))["data_path"] == "d"
    toml = tmp_path / "r.toml"
    toml.write_text('data-path = "d"\nsave-path = "s"\nblock-size = 4\n')
    assert build(TrainSettings, {}, toml).block_size == 4
    for text, says in (
        ("learning_rate: 1", "learning_rate"),
        ("lr: fast", "must be a number"),
        ("num_layers: true", "must be a whole number"),
        ("num_layers: 1.5", "must be a whole number"),
        ("- 1", "must be a mapping"),
        ("a: [", "cannot be read"),
        ("lr: -1", "--lr: -1"),
    ):
        recipe.write_text(f"{text}\n")
        with pytest.raises(InputError, match=says):
            build(TrainSettings, {"data_path": Path("d"), "save_path": Path("s")}, recipe)


def test_lists_may_be_written_with_spaces() -> None:
    flags = list_flags(TrainSettings)
    assert set(flags) == {"--target-layer-ids", "--full-attention-indices", "--tap-depths", "--vllm-endpoint"}
    given = ["--lr", "1", "--target-layer-ids", "1", "17", "29", "--seed", "3"]
    spread = ["--lr", "1", *(x for n in ("1", "17", "29") for x in ("--target-layer-ids", n)), "--seed", "3"]
    assert spread_lists(given, flags) == spread
    assert spread_lists(["--tap-depths", "0.1", ".5", "1"], flags) == [
        *("--tap-depths", "0.1", "--tap-depths", ".5", "--tap-depths", "1")
    ]
    for kept in (["--stop", "a b", "w1"], ["--stop", "a", "--stop", "b"], ["w1", "--stop"]):
        assert spread_lists(kept, list_flags(GenerateSettings)) == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_stopped_training_saves_its_state_and_is_75(
    capsys: pytest.CaptureFixture[str], workshop: Path, tmp_path: Path, number: int
) -> None:
    """Ctrl-C or SIGTERM: one line that says how to go on, no traceback, and the state on disk."""
    base = [sys.executable, "-m", "blockdraft.cli.main"]
    verifier = ["--verifier-name-or-path", str(workshop / "verifier"), "--dtype", "float32"]
    data = ["--data-path", str(workshop / "prompts"), "--save-path", str(tmp_path / "data")]
    assert call(capsys, "regenerate", *verifier, *data, "--max-new-tokens", "20")[0] == 0
    folders = ["--data-path", str(tmp_path / "data"), "--save-path", str(tmp_path / "run")]
    command = [*base, "train", *verifier, *folders, "--epochs", "10000", "--num-taps", "2", "--logger", "none"]
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("training: ") and "steps" in line:
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the same command goes on from there" in err and "Traceback" not in err
    assert (tmp_path / "run" / "latest" / "state.pt").is_file()


def test_quiet_and_verbose(capsys: pytest.CaptureFixture[str], workshop: Path) -> None:
    command = ("evaluate", workshop / "draft", "--data-path", workshop / "prompts.jsonl", "--max-prompts", 2,
               "--max-new-tokens", 4, "--json")  # fmt: skip
    code, out, usual = call(capsys, *command)
    assert code == 0 and usual.startswith("plain decoding: 2/2 in ") and usual.count("\n") == 2
    code, quiet_out, err = call(capsys, *command, "-q")
    assert code == 0 and err == "" and json.loads(quiet_out) == json.loads(out)
    code, _, err = call(capsys, *command, "-v")
    assert code == 0 and all(line in err.splitlines() for line in usual.splitlines())
    for detail in ("[main] blockdraft ", "'max_new_tokens': 4", "[main] device cpu", "checked in torch.float32 on cpu",
                   f"[files] read {workshop / 'draft' / 'config.json'}", "[main] done in "):  # fmt: skip
        assert detail in err, detail
    code, _, err = call(capsys, *command, "--quiet", "--verbose")
    assert code == 2 and err == "blockdraft: --verbose and --quiet: both given: pass one of them\n"


def test_an_error_is_said_quietly_too_and_verbose_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    line = "blockdraft: checkpoint: none-here: no such folder\n"
    assert call(capsys, "check", "none-here", "-q") == (2, "", line)
    code, _, err = call(capsys, "check", "none-here", "--verbose")
    assert code == 2 and line in err and "Traceback" in err and "in read_facts" in err


@pytest.mark.slow
def test_a_library_is_silent_and_a_command_leaves_no_handler() -> None:
    """A new process: pytest's own handlers would hide what Python does for loggers without one."""
    code = (
        "import logging, sys\n"
        "from blockdraft.cli.main import run\n"
        "from blockdraft.progress import progress, say, warn\n"
        "def speak():\n"
        "    say('commentary')\n"
        "    warn('warning')\n"
        "    with progress('work', 2) as advance:\n"
        "        advance(2)\n"
        "speak()\n"
        "run(['check', 'none-here', '-v'])\n"
        "speak()\n"
        "print('---', file=sys.stderr)\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s %(levelname)s %(filename)s %(message)s')\n"
        "speak()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before, after = done.stderr.split("---\n")
    assert before.startswith("[main] blockdraft") and before.endswith("none-here: no such folder\n"), before
    assert after.startswith("blockdraft INFO <string> commentary\nblockdraft WARNING <string> warning\n"), after
    assert "work: 2/2 in 0 s" in after


def test_printed_commands_can_be_called_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever ran `make quickstart` has not activated the environment: a bare name would not be found."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = tables.program_name().split()
    done = subprocess.run([*found, "version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "blockdraft"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert tables.program_name() == "blockdraft"


def test_a_former_name_works_and_says_what_it_is_called_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tmp_path / "r.yaml"
    for text in ("standardise-taps: false", "standardise_taps: false"):
        recipe.write_text(text + "\n")
        settings = build(TrainSettings, {"data_path": Path("d"), "save_path": Path("s")}, recipe)
        assert settings.standardize_taps is False
        assert "is called standardize-taps now" in caplog.messages[-1]
    recipe.write_text("standardise_taps: false\nstandardize_taps: true\n")
    with pytest.raises(InputError, match="stands there twice"):
        build(TrainSettings, {"data_path": Path("d"), "save_path": Path("s")}, recipe)
    given = ["--no-standardise-taps", "--lr", "1"]
    assert present_names(given, TrainSettings) == ["--no-standardize-taps", "--lr", "1"]
    assert "--no-standardise-taps is called --no-standardize-taps now" in caplog.messages[-1]
    caplog.clear()
    assert present_names(["--standardize-taps"], TrainSettings) == ["--standardize-taps"] and not caplog.messages


def test_what_identifies_a_run_is_marked_at_the_field() -> None:
    kept = set(identity(TrainSettings(data_path=Path("d"), save_path=Path("s"))))
    names = {field.name for field in dataclasses.fields(TrainSettings)}
    assert names - kept == {
        "checkpoint_freq", "data_path", "device", "dry_run", "from_pretrained", "fsdp_shard",
        "hidden_states_path", "max_retries",
        "num_workers", "prefetch", "request_timeout", "vllm_endpoint", "keep", "log_dir", "log_freq",
        "logger", "on_generate", "on_missing", "restart", "run_name", "save_path", "threads", "time_limit",
        "verifier_name_or_path",
    }  # fmt: skip
