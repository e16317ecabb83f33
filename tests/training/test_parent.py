"""Runs that start from a checkpoint: its shape, its weights, and where they came from on record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.store import load_draft, read_contract
from blockdraft.errors import InputError
from blockdraft.settings import TrainSettings
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import BEST, LAST
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example, tiny_verifier_of

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(12)]


def settings_of(folder: Path, **changes: object) -> TrainSettings:
    base = TrainSettings(
        dtype="float32", data_path=folder / "data", save_path=folder / "run", num_taps=3, epochs=2.0,
        total_seq_len=80, max_anchors=16, mask_token_id=100, train_data_ratio=0.7, logger="none", lr=2e-3,
        muon_lr=0.02, num_layers=2,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("changes", [{}, {"speculator_type": "dflare"}, {"draft_vocab_size": 40},
                                     {"speculator_type": "dspark", "sliding_window": 9}])  # fmt: skip
def test_a_run_goes_on_where_its_parent_ended(
    tiny_verifier: CausalVerifier, tmp_path: Path, changes: dict[str, object], said: Callable[[], str]
) -> None:
    """Whatever the flags of a draft say; the parent is on record, and is a part of what the run is."""
    first = settings_of(tmp_path / "first", **changes)
    Trainer.prepare(TrainingPlan(first, tiny_verifier, EXAMPLES)).run()
    parent = first.save_path / LAST
    second = settings_of(tmp_path / "second", from_pretrained=parent, num_layers=4)
    plan = TrainingPlan(second, tiny_verifier, EXAMPLES)
    text = said()
    assert f"starting from {parent}, a " in text and "its own count: " in text and "num-layers 2" in text
    trainer = Trainer.fresh(plan)
    loaded, contract = load_draft(parent, tiny_verifier, torch.float32)
    for (name, found), (_, wanted) in zip(trainer.draft.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(found, wanted), name
    Trainer.prepare(plan).run()
    assert read_contract(second.save_path / LAST).draft == contract.draft
    record = json.loads((second.save_path / BEST / "provenance.json").read_text())
    assert record["parent"]["folder"] == str(parent.resolve()) and len(record["parent"]["digest"]) == 16
    others = load_file(second.save_path / LAST / "model.safetensors"), load_file(parent / "model.safetensors")
    assert any(not torch.equal(others[0][name], others[1][name]) for name in others[0])
    with pytest.raises(InputError, match="was made with"):
        Trainer.prepare(TrainingPlan(settings_of(tmp_path / "second", **changes), tiny_verifier, EXAMPLES))


def test_a_parent_of_another_verifier_is_rejected(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    first = settings_of(tmp_path / "first", epochs=0.5)
    Trainer.prepare(TrainingPlan(first, tiny_verifier, EXAMPLES)).run()
    second = settings_of(tmp_path / "second", from_pretrained=first.save_path / LAST)
    with pytest.raises(InputError):
        TrainingPlan(second, tiny_verifier_of("qwen3"), EXAMPLES)
    with pytest.raises(InputError, match="checkpoint"):
        TrainingPlan(settings_of(tmp_path, from_pretrained=tmp_path / "nowhere"), tiny_verifier, EXAMPLES)


def test_a_checkpoint_says_what_it_came_from(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, epochs=0.5)
    plan = TrainingPlan(settings, tiny_verifier, EXAMPLES)
    Trainer.prepare(plan).run()
    record = json.loads((settings.save_path / BEST / "provenance.json").read_text())
    assert record["data_digest"] == plan.facts["data"] and record["parent"] is None and record["world_size"] == 1
    assert record["verifier"]["norms_hash"] == tiny_verifier.identity.norms_hash
    assert record["versions"]["torch"] == torch.__version__ and record["settings"]["seed"] == 0
    assert record["source"] is None or len(record["source"]["commit"]) == 40
