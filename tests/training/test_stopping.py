"""A run that is stopped by its time limit, what it keeps, and where its links lead."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from blockdraft.durations import seconds_of
from blockdraft.errors import BlockdraftError, InputError, StoppedError
from blockdraft.settings import TrainSettings
from blockdraft.training.background import background_writer
from blockdraft.training.history import Progress
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.resume import LATEST, ResumeState, ResumeStates
from blockdraft.training.run_folder import BEST, BEST_LINK, STATES
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(16)]


def plan_of(folder: Path, verifier: CausalVerifier, **changes: object) -> TrainingPlan:
    settings = {
        "dtype": "float32", "data_path": folder / "data", "save_path": folder / "run", "num_taps": 2, "num_layers": 1,
        "epochs": 2.0, "total_seq_len": 80, "max_anchors": 8, "mask_token_id": 100, "train_data_ratio": 0.7,
        "logger": "none", **changes,
    }  # fmt: skip
    return TrainingPlan(TrainSettings(**settings), verifier, EXAMPLES)  # type: ignore[arg-type]


def weights(folder: Path) -> bytes:
    return (folder / "run" / BEST / "model.safetensors").read_bytes()


def test_a_run_in_pieces_is_the_run_in_one(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """Every start stops after one step, since its time is over; the last one comes to the end."""
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    wanted = Trainer.prepare(plan_of(tmp_path / "whole", tiny_verifier)).run()
    stops = 0
    while True:
        try:
            found = Trainer.prepare(plan_of(tmp_path / "pieces", tiny_verifier, time_limit="0.000001")).run()
            break
        except StoppedError as stopped:
            stops += 1
            assert str(stopped) == f"stopped after step {stops}; the same command goes on from there"
            assert stopped.exit_code == 75
            assert (tmp_path / "pieces" / "run" / LATEST).resolve().name == f"step-{stops:08d}"
    assert stops == wanted["steps"] - 1 > 2
    assert weights(tmp_path / "whole") == weights(tmp_path / "pieces")
    lengths = [[entry["acceptance_length"] for entry in result["history"]] for result in (wanted, found)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_states_are_kept_as_asked(tiny_verifier: CausalVerifier, tmp_path: Path, keep: int) -> None:
    plan = plan_of(tmp_path, tiny_verifier, keep=keep, checkpoint_freq=0.01)
    Trainer.prepare(plan).run()
    total = plan.total_steps
    names = sorted(path.name for path in (tmp_path / "run" / STATES).iterdir())
    assert total > 3 and names == [f"step-{step:08d}" for step in range(total - keep + 1, total + 1)]


def test_links_lead_to_the_newest_state_and_the_best_checkpoint(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tiny_verifier)
    Trainer.prepare(plan).run()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert (moved / LATEST).resolve() == moved / STATES / f"step-{plan.total_steps:08d}"
    assert (moved / BEST_LINK).resolve() == moved / BEST


def test_a_state_is_a_copy_of_its_moment(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """What is written in the background must not change with the next step."""
    trainer = Trainer.prepare(plan_of(tmp_path, tiny_verifier))
    trainer._next_update(1.0)
    state = trainer._state()
    before = {name: tensor.clone() for name, tensor in state.draft.items()}
    moments = str(state.optimizers)
    trainer._next_update(1.0)
    assert all(before[name].equal(tensor) for name, tensor in state.draft.items())
    assert str(state.optimizers) == moments and state.progress.step == 1


def test_writing_goes_on_beside_training_and_only_a_second_one_waits() -> None:
    started, go_on, done = threading.Event(), threading.Event(), []

    def write() -> None:
        started.set()
        assert go_on.wait(60)
        done.append(1)

    with background_writer() as writer:
        writer.submit(write)
        assert started.wait(60) and not done  # this line is reached while the writing has not ended
        writer.raise_failure()
        go_on.set()
        writer.submit(lambda: done.append(2))
        assert done[0] == 1
    assert done == [1, 2]


def test_what_could_not_be_written_is_raised_and_the_state_before_is_whole(tmp_path: Path) -> None:
    states = ResumeStates(tmp_path / STATES)
    states.save(ResumeState({}, [], Progress(step=1)))
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    (tmp_path / LATEST / "in-the-way").touch()
    with pytest.raises(BlockdraftError, match=r"latest.* cannot be written"), background_writer() as writer:
        writer.submit(lambda: states.save(ResumeState({}, [], Progress(step=2))))
        writer.wait()
    found = ResumeStates(tmp_path / STATES).newest()
    assert found is not None and found.progress.step == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5400", 5400), ("90m", 5400), ("1.5h", 5400), ("3h30m", 12600), ("1d", 86400), ("2h 5", None), ("", None),
     ("0", None), ("soon", None), ("-5m", None), ("30m3h", None)],
)  # fmt: skip
def test_spans_of_time(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_a_wrong_time_limit_is_said_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--time-limit: soon: must be a span of time such as 3h30m"):
        TrainSettings(data_path=tmp_path, save_path=tmp_path / "run", time_limit="soon")
