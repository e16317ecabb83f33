"""Every recipe can be read, and says what the published run was."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockdraft.pipeline.train import train
from blockdraft.settings import TrainSettings, build
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from conftest import MASK, random_document

RECIPES = Path(__file__).parent.parent / "recipes"
T5GEMMA2 = RECIPES / "t5gemma2-1b-1b.dflare.yaml"
PLACES = {"data_path": Path("data"), "save_path": Path("run")}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_can_be_read(recipe: Path) -> None:
    assert build(TrainSettings, PLACES, recipe).epochs > 0


def test_the_published_t5gemma2_draft() -> None:
    settings = build(TrainSettings, PLACES, T5GEMMA2)
    assert (settings.speculator_type, settings.num_layers, settings.block_size) == ("dflare", 6, 8)
    assert len(settings.target_layer_ids) == 8 and max(settings.target_layer_ids) <= 26
    assert (settings.draft_vocab_size, settings.max_anchors, settings.epochs) == (32_000, 256, 6.0)
    assert (settings.optimizer, settings.seed, settings.train_data_ratio) == ("adamw", 42, 0.9)


def test_it_trains_a_small_verifier_unchanged(
    tiny_seq2seq: EncoderDecoderVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overridden: the verifier (with the two numbers that are bounded by its size), data, device and steps."""
    from blockdraft.pipeline import train as module
    from blockdraft.records import Document

    documents = []
    for seed in range(12):
        drawn = random_document(20 + seed, 1, seed)
        documents.append(
            Document.of_reply(str(seed), [2], drawn.input_ids[1:], "length", source_ids=drawn.input_ids[:15])
        )
    monkeypatch.setattr(module, "read_documents", lambda *_: documents)
    monkeypatch.setattr(module, "read_json", lambda *_: {})
    changes = {
        "verifier_name_or_path": "tiny", "target_layer_ids": (1, 2, 4), "draft_vocab_size": 60, "device": "cpu",
        "dtype": "float32", "mask_token_id": MASK, "epochs": 1.0, "data_path": tmp_path / "data",
        "save_path": tmp_path / "run", "logger": "none",
    }  # fmt: skip
    result = train(build(TrainSettings, changes, T5GEMMA2), tiny_seq2seq)
    assert result["steps"] >= 1 and result["best_acceptance_length"] >= 1
