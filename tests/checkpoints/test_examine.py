"""`blockdraft check`: a whole checkpoint has no finding, and each contradiction is found under its check's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.checkpoints.examine.command import parse_command
from blockdraft.checkpoints.examine.facts import read_facts
from blockdraft.checkpoints.examine.finding import Finding
from blockdraft.checkpoints.examine.table import CHECKS, examine
from blockdraft.checkpoints.store import PROVENANCE, save_draft
from blockdraft.verifiers.causal import CausalVerifier
from checkpoints.published import (
    LAYOUTS,
    VOCAB,
    change_config,
    change_tensors,
    draft_of,
    published_gemma,
    published_t5gemma,
)  # fmt: skip
from conftest import call, contract_of, rewrite, tiny_config, tiny_draft

LAYER = "transformer_layer_config"
SPECULATORS = "speculators_config"
RUN = {"settings": {"run_name": "draft", "epochs": 6.0, "lr": 2e-3, "max_anchors": 128, "seed": 0},
       "command": "blockdraft train --data-path d --save-path s --epochs 6 --block-size 8 --seed 0",
       "step": 40, "total_steps": 40}  # fmt: skip


def found_in(folder: Path) -> dict[str, list[Finding]]:
    """Findings by check; what could not be checked is left out."""
    found: dict[str, list[Finding]] = {}
    for each in examine(read_facts(folder)):
        if each.level != "not checked":
            found.setdefault(each.check, []).append(each)
    return found


@pytest.fixture(scope="session")
def own(tiny_verifier: CausalVerifier, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = tiny_draft(tiny_verifier, tiny_config("dflash", draft_vocab_size=40))
    folder = tmp_path_factory.mktemp("own") / "checkpoint"
    save_draft(folder, draft, contract_of(draft, tiny_verifier), torch.float32, RUN)
    return folder


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 40}, {"windows": (9, None), "causal": (True, False)},
                                     {"causal": (True, True)}], ids=str)  # fmt: skip
def test_a_clean_checkpoint_of_ours_has_no_finding(
    tiny_verifier: CausalVerifier, tmp_path: Path, method: str, changes: dict[str, Any]
) -> None:
    draft = tiny_draft(tiny_verifier, tiny_config(method, **changes))
    save_draft(tmp_path / "draft", draft, contract_of(draft, tiny_verifier), torch.float32, RUN)
    assert [
        each.text for found in found_in(tmp_path / "draft").values() for each in found if each.level == "error"
    ] == []


def test_nor_has_a_trained_one(own: Path) -> None:
    assert found_in(own) == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_checkpoint_of_another_layout_has_none(tmp_path: Path, layout: str) -> None:
    folder = draft_of(layout, tmp_path / "draft")
    facts = read_facts(folder)
    assert facts.layout == ("speculators" if layout == "dflare" else layout)
    assert facts.target_layer_ids == [1, 3, 5]
    assert found_in(folder) == {}


def setting(*path: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, *path, value=value)


def tensor(**changed: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, **changed)


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def recorded(command: str, state: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "train_command.txt").write_text(command)
        (folder / "training_state.json").write_text(state)

    return write


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def offsets(**at: int) -> torch.Tensor:
    ids = torch.arange(128)
    for place, value in at.items():
        ids[int(place[1:])] = value
    return ids - torch.arange(128)


BF16 = torch.bfloat16
BREAKS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("files", "speculators", truncated),
    ("files", "speculators", lambda folder: (folder / "model.safetensors").unlink()),
    ("files", "speculators", written("model.safetensors.index.json",
                                     '{"weight_map": {"gone.weight": "model.safetensors"}}')),
    ("layout", "z-lab", setting("dflash_config", value=None)),
    ("unknown-keys", "speculators", setting("blocksize", value=8)),
    ("unknown-keys", "z-lab", setting("dflash_config", "mask_id", value=4)),
    ("method", "speculators", setting(SPECULATORS, "algorithm", value="dspark")),
    ("method", "dflare", setting("speculators_model_type", value="dflash")),
    ("draft-vocabulary", "speculators", setting("draft_vocab_size", value=120)),
    ("draft-vocabulary", "speculators", tensor(lm_head__weight=torch.ones(100, 16, dtype=BF16).cumsum(0))),
    ("draft-vocabulary", "speculators", written("train_command.txt", "train --draft-vocab-size 100")),
    ("vocabulary-map", "speculators", tensor(d2t=None)),
    ("vocabulary-map", "speculators", tensor(d2t=offsets(_127=VOCAB))),
    ("vocabulary-map", "speculators", tensor(d2t=offsets(_5=4))),
    ("vocabulary-map", "speculators", tensor(t2d=torch.ones(VOCAB, dtype=torch.bool))),
    ("vocabulary-map", "speculators", tensor(t2d=torch.ones(VOCAB - 1, dtype=torch.bool))),
    ("vocabulary-map", "z-lab", tensor(d2t=offsets())),
    ("verifier-vocabulary", "speculators", tensor(embed_tokens__weight=torch.rand(9, 16).to(BF16))),
    ("mask-token", "speculators", setting("mask_token_id", value=VOCAB)),
    ("mask-token", "z-lab", setting("dflash_config", "mask_token_id", value=None)),
    ("mask-token", "z-lab", setting("mask_token_id", value=5)),
    ("block-size", "speculators", setting("block_size", value=1)),
    ("block-size", "z-lab", setting("dflash_config", "block_size", value=16)),
    ("block-size", "deepspec", written("train_command.txt", "train --block-size=8")),
    ("speculative-tokens", "speculators", setting("block_size", value=9)),
    ("speculative-tokens", "speculators", setting(SPECULATORS, "proposal_methods", value=[])),
    ("anchor-slot", "speculators", setting("sample_from_anchor", value=True)),
    ("anchor-slot", "z-lab", setting("dflash_config", "sample_from_anchor", value=True)),
    ("target-layers", "speculators", setting("aux_hidden_state_layer_ids", value=[1, 5, 3])),
    ("target-layers", "speculators", setting("aux_hidden_state_layer_ids", value=[1, 3, 3])),
    ("target-layers", "z-lab", setting("num_target_layers", value=4)),
    ("target-layers", "speculators", written("train_command.txt", "train --target-layer-ids 1 3 6 --seed 1")),
    ("fusion-width", "speculators", setting("aux_hidden_state_layer_ids", value=[1, 3])),
    ("fusion-width", "dflare", setting("aux_hidden_state_layer_ids", value=[1, 3])),
    ("verifier-names", "speculators", written("train_command.txt", "train --verifier-name-or-path org/other")),
    ("depth", "speculators", setting(LAYER, "num_hidden_layers", value=3)),
    ("depth", "z-lab", setting("layer_types", value=["full_attention"])),
    ("rotary", "speculators", setting(LAYER, "rope_theta", value=1e4)),
    ("rotary", "speculators", setting(LAYER, "rope_scaling", value={"rope_type": "yarn", "factor": 2.0})),
    ("rotary", "speculators", setting(LAYER, "rope_parameters", value=None)),
    ("windows", "speculators", setting(LAYER, "layer_types", value=["sliding_attention"] * 2)),
    ("windows", "speculators", setting(LAYER, "use_sliding_window", value=True)),
    ("windows", "z-lab", setting("dflash_config", "use_swa", value=True)),
    ("causality", "speculators", setting("sliding_window_non_causal", value=False)),
    ("activation", "speculators", setting(LAYER, "hidden_act", value="gelu_pytorch_tanh")),
    ("tensor-names", "speculators", tensor(layers__1__self_attn__q_norm__weight=None)),
    ("tensor-names", "z-lab", tensor(mask_hidden=torch.rand(16).to(BF16))),
    ("tensor-names", "z-lab", tensor(verifier_norm__weight=torch.rand(16).to(BF16))),
    ("shapes", "speculators", setting(LAYER, "head_dim", value=4)),
    ("shapes", "deepspec", setting("intermediate_size", value=25)),
    ("dtype", "speculators", setting("dtype", value="float16")),
    ("dtype", "z-lab", setting("dtype", value="float32")),
    ("numbers", "speculators", tensor(layers__0__mlp__up_proj__weight=torch.full((24, 16), torch.nan, dtype=BF16))),
    ("numbers", "speculators", tensor(norm__weight=torch.full((16,), torch.inf, dtype=BF16))),
    ("numbers", "speculators", tensor(layers__0__mlp__up_proj__weight=torch.zeros(24, 16, dtype=BF16))),
    ("run-name", "speculators", written("train_command.txt", "train --run-name 5epochs --epochs 3")),
    ("hyperparameters", "speculators", recorded('train --lr 6e-4', '{"lr": 0.1}')),
    ("progress", "speculators", recorded('train --epochs 3', '{"epoch": 5}')),
    ("card", "speculators", lambda folder: (folder / "README.md").unlink()),
    ("card", "speculators", written("README.md", "# no license")),
    ("card", "speculators", written("README.md", "---\nlicense: mit\nbase_model: org/other\n---\n")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout", "break_it"), BREAKS, ids=[f"{i}-{each[0]}" for i, each in enumerate(BREAKS)]
)
def test_a_contradiction_is_found_under_its_name(
    tmp_path: Path, name: str, layout: str, break_it: Callable[[Path], None]
) -> None:
    folder = draft_of(layout, tmp_path / "draft")
    break_it(folder)
    assert name in found_in(folder)


def test_every_check_has_a_break() -> None:
    assert {name for name, _, _ in BREAKS} == {each.name for each in CHECKS} - {"contract"}


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (("draft_vocab_size",), 41, {"contract", "draft-vocabulary"}),
        (("block_size",), 9, {"contract", "block-size", "speculative-tokens"}),
        (("mask_token_id",), 5, {"contract", "mask-token"}),
        (("sliding_window_non_causal",), False, {"contract", "causality"}),
        (("blockdraft", "verifier", "num_layers"), 3, {"contract", "target-layers"}),
        ((LAYER, "rope_theta"), 1e6, {"contract", "rotary"}),
        (("blockdraft", "compute_dtype"), "float16", {"contract"}),
    ],
)
def test_a_changed_contract_is_found_twice(
    own: Path, tmp_path: Path, path: tuple[str, ...], value: Any, names: set[str]
) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    change_config(folder, *path, value=value)
    assert found_in(folder).keys() == names


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"settings": {**RUN["settings"], "run_name": "draft-5epochs"}}, "run-name"),  # type: ignore[dict-item]
        ({"command": "blockdraft train --epochs 3"}, "hyperparameters"),
        ({"step": 41}, "progress"),
    ],
)
def test_records_of_another_run_are_found(own: Path, tmp_path: Path, change: dict[str, Any], name: str) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    (folder / PROVENANCE).write_text(json.dumps({**RUN, **change}))
    assert found_in(folder).keys() == {name}


def test_the_published_gemma_draft_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published_gemma(tmp_path / "gemma")
    found = found_in(folder)
    assert found.keys() == {"draft-vocabulary", "run-name"}
    (vocabulary,) = found["draft-vocabulary"]
    assert (vocabulary.field, vocabulary.value) == ("README.md --draft-vocab-size", "128")
    assert f"draft_vocab_size says {VOCAB}" in vocabulary.hint
    assert all("claims 5 epochs; training_state.json epoch says 3" in each.hint for each in found["run-name"])
    code, out, _ = call(capsys, "check", folder, "--json")
    result = json.loads(out)
    assert code == 1 and len(result["failures"]) == 3 and result["verifier compared"] is False
    code, out, _ = call(capsys, "check", folder)
    assert code == 1 and "error: draft-vocabulary: README.md --draft-vocab-size: 128: config.json" in out
    assert "not checked: verifier: identity and weights: org/verifier-it: no folder here" in out


def test_the_published_t5gemma_draft_is_reported(tmp_path: Path) -> None:
    found = found_in(published_t5gemma(tmp_path / "t5"))
    assert found.keys() == {"causality", "activation", "rotary", "run-name", "hyperparameters", "progress"}


def test_a_verifier_is_compared_by_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    stated = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 6, "vocab_size": VOCAB, "eos_token_id": 1}
    arguments = ("check", draft_of("speculators", tmp_path / "draft"), "--verifier-name-or-path", verifier, "--json")
    (verifier / "config.json").write_text(json.dumps(stated))
    code, out, _ = call(capsys, *arguments)
    assert code == 0, out
    wrong = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": VOCAB + 1, "eos_token_id": [1, 4]}
    (verifier / "config.json").write_text(json.dumps({**stated, **wrong}))
    code, out, _ = call(capsys, *arguments)
    checks = {each["check"] for each in json.loads(out)["findings"] if each["level"] == "error"}
    assert (code, checks) == (1, {"verifier-names", "target-layers", "verifier-vocabulary", "mask-token"})


def test_commands_are_read_over_lines_and_with_equal_signs() -> None:
    found = parse_command("torchrun \\\n  t.py --a=3 --b 1,2 3 \\\n --c_d 6e-4 # --e 5", "here")
    assert found is not None
    assert (found.number("a"), found.numbers("b"), found.number("c_d"), found.text("e")) == (3, [1, 2, 3], 6e-4, None)
    assert parse_command("no flags", "here") is None


def test_a_signed_change_of_weights_is_still_examined(own: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"].fill_(0.5)
    rewrite(folder, tensors=tensors)
    assert found_in(folder).keys() == {"numbers"}


def test_the_docs_list_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checking.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = [line for line in rows if line.split("`")[1] not in ("error", "warning", "not checked", "verifier")]
    assert listed == [f"| `{each.name}` | {each.question} |" for each in CHECKS]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key and entry of a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield (*path, key)
        yield from places(each, (*path, key))


@pytest.mark.parametrize("layout", ["own", "speculators", "z-lab"])
def test_values_of_other_types_are_findings_and_no_crash(own: Path, tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(own, folder) if layout == "own" else draft_of(layout, folder)
    (folder / "train_command.txt").write_text("train --epochs nan --block-size inf --draft-vocab-size 1e999 --lr")
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    checks = [each for each in CHECKS if each.name != "numbers"]  # which reads tensors alone
    for place in list(places(stated)):
        for wrong in ("x", [None], {"a": 1}, 10**12):
            changed = json.loads(json.dumps(stated))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            path.write_text(json.dumps(changed))
            examine(read_facts(folder), checks)
