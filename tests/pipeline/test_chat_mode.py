"""What the chat template was told for the data goes with the draft, to whoever decodes with it and to the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blockdraft.data.table import read_examples
from blockdraft.data.templates import ChatMode
from blockdraft.pipeline.loading import encode_all, load_pair
from blockdraft.pipeline.prepare import prepare
from blockdraft.pipeline.regenerate import regenerate
from blockdraft.pipeline.serve import planned
from blockdraft.pipeline.train import train
from blockdraft.settings import CheckpointSettings, PrepareSettings, RegenerateSettings, ServeSettings, TrainSettings
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import TEMPLATE, tiny_verifier_of

THINKING = TEMPLATE.replace(
    "assistant {% endif %}",
    "assistant {% if enable_thinking is defined and not enable_thinking %}w90 {% endif %}{% endif %}",
)
QUESTION = [{"role": "user", "content": "w3 w4"}]
NOT_THINKING, CLOSES = 93, 96  # w90, and the word that opens a reply


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of data that were made without thinking."""
    root = tmp_path_factory.mktemp("mode")
    tiny = tiny_verifier_of("llama")
    with torch.no_grad():
        tiny.head_VE[[0, 2, *range(97, 128)]] = 0
    tiny.tokenizer.chat_template = THINKING
    save_folder(tiny, root / "verifier")
    name = str(root / "verifier")
    source = ("chat=builtin/chat@30",)
    prepare(
        PrepareSettings(
            verifier_name_or_path=name, source=source, save_path=root / "prompts", prompts_only=True, thinking="off"
        )
    )  # fmt: skip
    own = {"verifier_name_or_path": name, "dtype": "float32"}
    regenerate(RegenerateSettings(**own, data_path=root / "prompts", save_path=root / "data", max_new_tokens=8))
    for example in read_examples(root / "data", "data"):
        assert example.input_ids[example.first_target - 2 : example.first_target] == [CLOSES, NOT_THINKING]
    made = train(
        TrainSettings(
            **own, data_path=root / "data", save_path=root / "draft", logger="none", mask_token_id=100, epochs=1.0,
            num_layers=1, num_taps=2,
        )
    )  # fmt: skip
    return Path(made["checkpoint"])


def test_decoding_follows_the_data_unless_told_otherwise(checkpoint: Path) -> None:
    assert json.loads((checkpoint / "provenance.json").read_text())["chat"] == {"thinking": "off", "tools": []}
    for thinking, ends in (("trained", NOT_THINKING), ("off", NOT_THINKING), ("on", CLOSES), ("auto", CLOSES)):
        pair = load_pair(CheckpointSettings(checkpoint=checkpoint, dtype="float32", thinking=thinking))
        (prompt,) = encode_all(pair.verifier, [QUESTION], pair.mode)
        assert prompt[-1] == ends, thinking


def test_a_draft_that_does_not_say_is_decoded_as_the_template_has_it(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "provenance.json":
            (bare / path.name).write_bytes(path.read_bytes())
    assert load_pair(CheckpointSettings(checkpoint=bare, dtype="float32")).mode == ChatMode()


@pytest.mark.engine
def test_the_server_is_told(checkpoint: Path) -> None:
    for thinking, wanted in (
        ("trained", {"enable_thinking": False}),
        ("on", {"enable_thinking": True}),
        ("auto", None),
    ):
        command = planned(ServeSettings(checkpoint=checkpoint, thinking=thinking, port=8471)).command
        told = "--default-chat-template-kwargs"
        assert (json.loads(command[command.index(told) + 1]) if told in command else None) == wanted


def test_the_verifier_itself_is_told_nothing(checkpoint: Path) -> None:
    verifier = load_verifier(str(checkpoint.parent.parent / "verifier"), torch.float32)
    assert encode_all(verifier, [QUESTION])[0][-1] == CLOSES
