"""Hidden states on disk: what is read is what would have been made, and a folder of others is rejected."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockdraft.errors import BlockdraftError, InputError
from blockdraft.records import Example
from blockdraft.settings import TrainSettings
from blockdraft.training import hidden_state_files
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import LAST
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.base import Verifier
from conftest import random_example, tiny_encoder_decoder, tiny_verifier_of

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(20)]
LENGTHS = [2, 2, 9, 10, 11, 12, 13, 2, 9, 30]  # a target of one token is a text of two: the start token comes first
PAIRS = [
    dataclasses.replace(random_example(LENGTHS[i % 10], 1, i), source_ids=random_example(5 + i, 1, 100 + i).input_ids)
    for i in range(20)
]


@pytest.fixture(scope="module")
def verifiers() -> dict[str, Verifier]:
    return {"causal": tiny_verifier_of("llama"), "seq2seq": tiny_encoder_decoder()}


def examples_of(kind: str) -> list[Example]:
    return EXAMPLES if kind == "causal" else PAIRS


def settings_of(folder: Path, name: str, **changes: object) -> TrainSettings:
    base = TrainSettings(
        dtype="float32", data_path=folder / "data", save_path=folder / name, target_layer_ids=(0, 2, 4), epochs=2.0,
        total_seq_len=80, max_anchors=16, mask_token_id=100, train_data_ratio=0.7, logger="none", lr=2e-3,
        muon_lr=0.02, num_layers=2,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def trained(settings: TrainSettings, verifier: Verifier, examples: Sequence[Example]) -> bytes:
    Trainer.prepare(TrainingPlan(settings, verifier, examples)).run()
    return (settings.save_path / LAST / "model.safetensors").read_bytes()


def same(found: Sequence, wanted: Sequence) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.taps, other.taps) and torch.equal(one.greedy, other.greedy)
        assert (one.final is None) == (other.final is None)
        assert one.final is None or torch.equal(one.final, other.final)


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_training_from_a_folder_is_training_in_process(
    verifiers: dict[str, Verifier], tmp_path: Path, kind: str, loss: str
) -> None:
    verifier, examples = verifiers[kind], examples_of(kind)
    wanted = trained(settings_of(tmp_path, "plain", loss_fn=loss), verifier, examples)
    from_folder = {"loss_fn": loss, "hidden_states_path": tmp_path / "states"}
    assert trained(settings_of(tmp_path, "first", **from_folder), verifier, examples) == wanted
    again = settings_of(tmp_path, "again", **from_folder, states_memory_gib=0.0, on_missing="raise")
    assert trained(again, _deaf(verifier), examples) == wanted  # everything is read, nothing is made


def _deaf(verifier: Verifier) -> Verifier:
    """A verifier that may be asked anything but for hidden states."""

    class Deaf:
        def __getattr__(self, name: str) -> object:
            assert name != "states"
            return getattr(verifier, name)

    return Deaf()  # type: ignore[return-value]


def test_a_folder_grows_and_goes_on(verifiers: dict[str, Verifier], tmp_path: Path) -> None:
    """A run that was killed left some files whole and one half written; the next makes what is missing, no more."""
    maker = InProcess(verifiers["causal"], (1, 3), with_final=True)
    files = HiddenStateFiles(tmp_path / "s", maker)
    files.prepare(EXAMPLES[:7])
    kept = {path: path.read_bytes() for path in (tmp_path / "s").glob("*/*.safetensors")}
    assert len(kept) == 7
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    half, growing = (next(iter(kept)).with_name(f".half.safetensors.{process}.tmp") for process in (gone, os.getppid()))
    half.write_bytes(b"half")
    growing.write_bytes(b"half")  # of a process that is alive
    again = HiddenStateFiles(tmp_path / "s", maker)
    assert again.missing(EXAMPLES) == list(range(7, 20))
    again.prepare(EXAMPLES)
    assert again.missing(EXAMPLES) == [] and not half.exists() and growing.exists()
    assert all(path.read_bytes() == content for path, content in kept.items())
    for found, wanted in zip(again.get(EXAMPLES), maker.get(EXAMPLES), strict=True):
        torch.testing.assert_close(found.taps, wanted.taps)
        torch.testing.assert_close(found.final, wanted.final)
        assert torch.equal(found.greedy, wanted.greedy)


def test_a_folder_with_more_serves_less(verifiers: dict[str, Verifier], tmp_path: Path) -> None:
    verifier = verifiers["causal"]
    rich = HiddenStateFiles(tmp_path / "s", InProcess(verifier, (0, 1, 2, 3, 4), with_final=True))
    rich.prepare(EXAMPLES[:10])
    poor = HiddenStateFiles(tmp_path / "s", InProcess(verifier, (3, 1)))
    # What is missing is made as the folder has it, for whoever comes next.
    same(poor.get(EXAMPLES[10:]), InProcess(verifier, (3, 1)).get(EXAMPLES[10:]))
    assert HiddenStateFiles(tmp_path / "s", InProcess(verifier, (0, 4), True), "raise").available(EXAMPLES) is EXAMPLES
    whole = rich.get(EXAMPLES[:10])
    for found, all_of_it in zip(poor.get(EXAMPLES[:10]), whole, strict=True):
        assert torch.equal(found.taps, all_of_it.taps[:, [3, 1]]) and found.final is None


def test_taps_come_in_the_order_in_which_they_are_asked_for(verifiers: dict[str, Verifier], tmp_path: Path) -> None:
    verifier = verifiers["causal"]
    HiddenStateFiles(tmp_path / "s", InProcess(verifier, (1, 3))).prepare(EXAMPLES[:5])
    turned = HiddenStateFiles(tmp_path / "s", InProcess(verifier, (3, 1)), "raise").get(EXAMPLES[:5])
    for found, wanted in zip(turned, InProcess(verifier, (3, 1)).get(EXAMPLES[:5]), strict=True):
        torch.testing.assert_close(found.taps, wanted.taps)


def test_a_file_is_of_one_text_with_one_source(verifiers: dict[str, Verifier], tmp_path: Path) -> None:
    files = HiddenStateFiles(tmp_path / "s", InProcess(verifiers["seq2seq"], (1,)))
    other = dataclasses.replace(PAIRS[0], source_ids=PAIRS[1].source_ids)
    assert files.path(PAIRS[0]) != files.path(other)
    assert files.path(PAIRS[0]) == files.path(dataclasses.replace(PAIRS[0], id="another name"))


def test_states_of_something_else_are_refused(verifiers: dict[str, Verifier], tmp_path: Path) -> None:
    verifier = verifiers["causal"]
    HiddenStateFiles(tmp_path / "s", InProcess(verifier, (1, 3))).prepare(EXAMPLES[:2])
    rounded = tiny_verifier_of("llama", torch.bfloat16)
    for maker, says in (
        (InProcess(verifier, (1, 2)), r"was made with tap_ids \[1, 3\], now asked for \[1, 2\]"),
        (InProcess(verifier, (1, 3), True), "was made with with_final False"),
        (InProcess(rounded, (1, 3)), "was made with dtype 'float32', now asked for 'bfloat16'"),
        (InProcess(tiny_verifier_of("qwen3"), (1, 3)), "was made with verifier"),
    ):
        with pytest.raises(InputError, match=says):
            HiddenStateFiles(tmp_path / "s", maker)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds something else"):
        HiddenStateFiles(tmp_path / "other", InProcess(verifier, (1, 3)))


def test_examples_without_states(verifiers: dict[str, Verifier], tmp_path: Path, said: Callable[[], str]) -> None:
    verifier, folder = verifiers["causal"], tmp_path / "s"
    maker = InProcess(verifier, (0, 2, 4))
    HiddenStateFiles(folder, maker).prepare([d for i, d in enumerate(EXAMPLES) if i not in (3, 8)])
    asked = {"hidden_states_path": folder}
    with pytest.raises(InputError, match=r"lacks 2 of 20 examples .*the first: doc3.*blockdraft states"):
        TrainingPlan(settings_of(tmp_path, "r", **asked, on_missing="raise"), verifier, EXAMPLES)
    for choice, named in (("skip", False), ("warn", True)):
        plan = TrainingPlan(settings_of(tmp_path, "r", **asked, on_missing=choice), verifier, EXAMPLES)
        assert {d.id for d in plan.examples} == {d.id for d in EXAMPLES} - {"doc3", "doc8"}
        text = said()
        assert "2 of 20 examples have none and are left out" in text and ("doc8" in text) == named
    with pytest.raises(InputError, match="lacks 20 of 20"):
        HiddenStateFiles(tmp_path / "empty", maker, "skip").available(EXAMPLES)
    deleted = HiddenStateFiles(folder, maker, on_generate="delete")
    deleted.prepare(EXAMPLES)
    same(deleted.get([EXAMPLES[3], EXAMPLES[0]])[:1], maker.get([EXAMPLES[3]]))
    assert deleted.missing(EXAMPLES) == [3, 8]


def test_damaged_files(verifiers: dict[str, Verifier], tmp_path: Path, said: Callable[[], str]) -> None:
    maker = InProcess(verifiers["causal"], (1, 3))
    files = HiddenStateFiles(tmp_path / "s", maker)
    files.prepare(EXAMPLES[:3])
    files.path(EXAMPLES[0]).write_bytes(files.path(EXAMPLES[0]).read_bytes()[:300])
    shutil.copy(files.path(EXAMPLES[2]), files.path(EXAMPLES[1]))
    with pytest.raises(BlockdraftError, match="gone or damaged"):
        HiddenStateFiles(tmp_path / "s", maker, "raise").get(EXAMPLES[:1])
    said()
    same(files.get(EXAMPLES[:3])[:2], maker.get(EXAMPLES[:2]))
    text = said()
    assert "is damaged" in text and "is not what its name says" in text
    HiddenStateFiles(tmp_path / "s", maker, "raise").get(EXAMPLES[:3])  # fixed
    assert not said()


def test_a_full_disk_is_found_before_work_starts(
    verifiers: dict[str, Verifier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_state_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30 + 10_000))
    files = HiddenStateFiles(tmp_path / "s", InProcess(verifiers["causal"], (1, 3)))
    with pytest.raises(InputError, match=r"20 examples need .* GiB there and 0\.0 are free"):
        files.prepare(EXAMPLES)
    assert not list((tmp_path / "s").rglob("*.safetensors"))
