"""The commands with an encoder-decoder verifier, from prompts to a draft that is evaluated, and what they reject."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from blockdraft.data.record import read_record
from blockdraft.data.table import read_examples
from blockdraft.errors import InputError
from blockdraft.pipeline.check import check
from blockdraft.pipeline.evaluate import evaluate
from blockdraft.pipeline.generate import generate
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.pipeline.states import states
from blockdraft.pipeline.train import train
from blockdraft.settings import (
    CheckSettings,
    EvaluateSettings,
    GenerateSettings,
    PrepareSettings,
    RegenerateSettings,
    StatesSettings,
    TrainSettings,
)
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import save_folder
from conftest import IMAGE, VOCAB, tiny_tokenizer, tiny_verifier_of


@dataclass(frozen=True)
class Stage:
    """Folders of a verifier of each kind, prompts, and replies of each to them."""

    root: Path

    def regenerated(self, kind: str) -> Path:
        folder = self.root / f"data-{kind}"
        if not folder.exists():
            name, prompts = str(self.root / kind), self.root / f"prompts-{kind}"
            source = (f"s={self.root / 'prompts.jsonl'}",)
            prepare(PrepareSettings(verifier_name_or_path=name, source=source, save_path=prompts, prompts_only=True))
            regenerate(
                RegenerateSettings(
                    verifier_name_or_path=name, dtype="float32", data_path=prompts, save_path=folder,
                    max_new_tokens=20, batch_size=5,
                )
            )  # fmt: skip
        return folder

    def settings(self, verifier: str, data: str, name: str, method: str = "dflare") -> TrainSettings:
        examples = read_examples(self.regenerated(data), "data")
        free = max(set(range(VOCAB)) - {token for example in examples for token in example.input_ids})
        return TrainSettings(
            verifier_name_or_path=str(self.root / verifier), dtype="float32", data_path=self.regenerated(data),
            save_path=self.root / name, speculator_type=method, logger="none", mask_token_id=free, epochs=2.0,
            total_seq_len=128, num_layers=1, lr=2e-3, muon_lr=4e-2,
        )  # fmt: skip


@pytest.fixture(scope="module")
def stage(tiny_seq2seq: EncoderDecoderVerifier, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    root = tmp_path_factory.mktemp("commands")
    save_folder(tiny_seq2seq, root / "seq2seq")
    save_folder(tiny_verifier_of("llama"), root / "causal")
    for kind in ("seq2seq", "causal"):  # prompts as they are: without a template there is nothing around them
        (root / kind / "chat_template.jinja").unlink()
    lines = [{"prompt": " ".join(f"w{(7 * i + j * j) % 90}" for j in range(3 + i))} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Stage(root)


@pytest.fixture(scope="module")
def checkpoint_of(stage: Stage) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str, method: str = "dflare") -> Path:
        name = f"{method}-{kind}"
        if name not in made:
            made[name] = Path(train(stage.settings(kind, kind, name, method))["checkpoint"])
        return made[name]

    return make


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_from_prompts_to_an_evaluated_draft(stage: Stage, checkpoint_of: Callable[..., Path], method: str) -> None:
    examples = read_examples(stage.regenerated("seq2seq"), "data")
    assert all(example.input_ids[0] == 2 and example.first_target == 1 for example in examples)
    lengths = sorted(len(example.source_ids or []) for example in examples)
    assert lengths == [3 + i for i in range(12)]
    checkpoint = checkpoint_of("seq2seq", method)
    found = evaluate(
        EvaluateSettings(
            checkpoint=checkpoint, dtype="float32", data_path=stage.root / "prompts.jsonl", k=(3, 7), decode=True,
            max_new_tokens=20,
        )
    )  # fmt: skip
    assert found["disagreements"] == 0
    for k in ("3", "7"):
        decoded = found["decoding"][k]
        assert decoded["identical"] == decoded["same_rounds_as_one_pass"] == 12
        assert decoded["acceptance_length"] == found["acceptance"][k]["acceptance_length"]
    reply = generate(GenerateSettings(checkpoint=checkpoint, dtype="float32", prompt=("w7 w8 w9",), max_new_tokens=9))
    assert 1 <= len(reply["replies"][0]["tokens"]) <= 9
    assert check(CheckSettings(checkpoint=checkpoint))["verifier compared"]


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_states_on_disk_train_the_same_draft(
    stage: Stage, checkpoint_of: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    changes = {"save_path": tmp_path / "draft", "hidden_states_path": tmp_path / "states", "on_missing": "raise"}
    settings = dataclasses.replace(stage.settings(kind, kind, "from-disk"), **changes)
    asked = StatesSettings(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})
    planned = states(dataclasses.replace(asked, dry_run=True))
    assert planned["made"] == planned["documents"] == 12 and not (tmp_path / "states").exists()
    made = states(asked)
    assert made == planned and states(asked) == {**made, "made": 0, "found": 12}
    checkpoint = Path(train(settings)["checkpoint"])
    weights = [folder / "model.safetensors" for folder in (checkpoint, checkpoint_of(kind))]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_draft_of_the_other_kind_of_verifier_is_refused(stage: Stage, checkpoint_of: Callable[..., Path]) -> None:
    for kind, other in (("causal", "seq2seq"), ("seq2seq", "causal")):
        folder = str(stage.root / other)
        with pytest.raises(InputError, match=r"verifier architecture: the draft was trained for .*, this one has"):
            evaluate(EvaluateSettings(checkpoint=checkpoint_of(kind), verifier_name_or_path=folder, dtype="float32"))
        found = check(CheckSettings(checkpoint=checkpoint_of(kind), verifier_name_or_path=folder))
        assert any("verifier architecture" in line for line in found["failures"])


@pytest.mark.parametrize(
    ("verifier", "data", "says"),
    [
        ("seq2seq", "causal", "an encoder, and this text has no source"),
        ("causal", "seq2seq", "has no encoder"),
    ],
)
def test_data_of_the_other_kind_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, verifier: str, data: str, says: str
) -> None:
    """Even where nobody wrote down which verifier the replies are of."""
    from blockdraft.pipeline import train as module

    with pytest.raises(InputError, match="another verifier wrote its replies"):
        train(stage.settings(verifier, data, "never"))
    record = read_record(stage.regenerated(data), "data")
    del record["facts"]["verifier"]
    monkeypatch.setattr(module, "read_record", lambda *_: record)
    with pytest.raises(InputError, match=says):
        train(stage.settings(verifier, data, "never"))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("w5 " * 65, "prompt 1: 65 tokens: the verifier's encoder reads 64"), ("w5 <image>", "stands for an image")],
)
def test_sources_that_cannot_be_read_are_refused(
    stage: Stage, checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, prompt: str, says: str
) -> None:
    from blockdraft.pipeline import loading

    words = tiny_tokenizer()
    words.add_tokens(["<image>"])
    monkeypatch.setattr(
        loading, "encode_prompt",
        lambda _, turns, *__: [IMAGE if i == words.convert_tokens_to_ids("<image>") else i
                          for i in words(turns[0]["content"])["input_ids"]],
    )  # fmt: skip
    with pytest.raises(InputError, match=says):
        generate(GenerateSettings(checkpoint=checkpoint_of("seq2seq"), dtype="float32", prompt=(prompt,)))
