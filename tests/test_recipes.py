"""Every recipe can be read, and says what the published run was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockdraft.checkpoints.store import read_contract
from blockdraft.data.sources import parse_sources
from blockdraft.data.table import read_examples
from blockdraft.data.vocabulary import occurring_tokens
from blockdraft.errors import InputError
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.pipeline.train import train
from blockdraft.presets import PRESETS
from blockdraft.settings import PrepareSettings, RegenerateSettings, TrainSettings, build
from blockdraft.training.creation import choose_taps
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import save_folder
from conftest import VOCAB

RECIPES = Path(__file__).parent.parent / "recipes"
T5GEMMA2 = RECIPES / "t5gemma2-1b-1b.dflare.yaml"
DATA = RECIPES / "t5gemma2-1b-1b.data.yaml"
PLACES = {"data_path": Path("data"), "save_path": Path("run")}


KINDS = {"data": PrepareSettings, "train": TrainSettings, **dict.fromkeys(PRESETS, TrainSettings)}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_can_be_read(recipe: Path) -> None:
    kind = KINDS[recipe.name.split(".")[-2]]
    places = {name: path for name, path in PLACES.items() if name in kind.__dataclass_fields__}
    assert build(kind, places, recipe).verifier_name_or_path


def test_a_name_is_enough_wherever_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = build(TrainSettings, PLACES, Path("qwen3-8b.dflash"))
    assert (settings.verifier_name_or_path, settings.block_size) == ("Qwen/Qwen3-8B", 16)
    with pytest.raises(InputError, match=r"--config: qwen3-8b\.dflesh: .*there are qwen3-8b\.dflash"):
        build(TrainSettings, PLACES, Path("qwen3-8b.dflesh"))


def test_the_published_t5gemma2_draft() -> None:
    settings = build(TrainSettings, PLACES, T5GEMMA2)
    assert (settings.speculator_type, settings.num_layers, settings.block_size) == ("dflare", 6, 8)
    assert choose_taps(settings, "layerwise", 26) == (2, 5, 8, 11, 14, 17, 20, 22)
    assert (settings.draft_vocab_size, settings.max_anchors, settings.epochs) == (32_000, 256, 6.0)
    assert (settings.optimizer, settings.seed, settings.train_data_ratio) == ("adamw", 42, 0.9)
    data = build(PrepareSettings, {"save_path": PLACES["save_path"]}, DATA)
    assert (data.num_rows, data.seed, data.max_source_length, data.max_length) == (200_000, 42, 2048, 1024)
    assert len(parse_sources(data.source, data.converter)) == 3


def test_it_trains_a_small_verifier_unchanged(tiny_seq2seq: EncoderDecoderVerifier, tmp_path: Path) -> None:
    """Overridden: the verifier (its mask token too, since this tokenizer has none), data and number of steps."""
    save_folder(tiny_seq2seq, tmp_path / "verifier")
    name = str(tmp_path / "verifier")
    rows = [{"prompt": f"w{i} w{2 * i % 90} w{3 * i % 90}"} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "verifier_name_or_path": name,
        "source": (f"s={tmp_path / 'rows.jsonl'}",),
        "converter": (),
        "num_rows": 30,
    }
    prepare(build(PrepareSettings, {**changes, "save_path": tmp_path / "prompts"}, DATA))
    regenerate(
        RegenerateSettings(
            verifier_name_or_path=name, dtype="float32", data_path=tmp_path / "prompts", save_path=tmp_path / "data",
            max_new_tokens=12,
        )
    )  # fmt: skip
    free = max(set(range(VOCAB)) - occurring_tokens(read_examples(tmp_path / "data", "data")))
    changes = {"verifier_name_or_path": name, "mask_token_id": free, "epochs": 1.0, "data_path": tmp_path / "data",
               "save_path": tmp_path / "run"}  # fmt: skip
    result = train(build(TrainSettings, changes, T5GEMMA2))
    assert result["steps"] >= 1 and result["best_acceptance_length"] >= 1
    config = read_contract(Path(result["checkpoint"])).draft
    assert config.target_layer_ids == (0, 1, 2, 3) and config.draft_vocab_size == VOCAB
