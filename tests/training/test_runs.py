"""A run's folder: damaged states, changed settings, a second process, disks that are full or read-only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blockdraft.data.packing import pack_row
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import locked
from blockdraft.settings import TrainSettings
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.history import SUMMARY, Progress, Validation
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.resume import ResumeState, ResumeStates
from blockdraft.training.run_folder import BEST, LAST, RECORD, STATES, RunFolder
from blockdraft.training.step import row_loss
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import call, own_replies, random_example, tiny_verifier_of

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(12)]


def settings_of(folder: Path, **changes: object) -> TrainSettings:
    base = TrainSettings(
        dtype="float32", data_path=folder / "data", save_path=folder / "run", num_taps=3, epochs=3.0,
        total_seq_len=80, max_anchors=16, mask_token_id=100, train_data_ratio=0.7, logger="none", lr=2e-3,
        muon_lr=0.02, num_layers=2,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def prepared(settings: TrainSettings, verifier: CausalVerifier) -> Trainer:
    return Trainer.prepare(TrainingPlan(settings, verifier, EXAMPLES))


def weights(folder: Path) -> bytes:
    return (folder / "run" / LAST / "model.safetensors").read_bytes()


# --- states -----------------------------------------------------------------------------------------------------


def state_at(step: int) -> ResumeState:
    progress = Progress(step, 1.5, 2.0, (Validation(step, 1.5, 2.0, 0.5),))
    return ResumeState({"weight": torch.full((3,), float(step))}, [{"state": {0: {"moment": torch.ones(2)}}}], progress)


def flipped(path: Path) -> None:
    """One bit of a tensor's bytes: the archive still unpickles."""
    content = bytearray(path.read_bytes())
    at = content.index(torch.full((3,), float(torch.load(path)["progress"]["step"])).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        del content[key]
        torch.save(content, path)
        digest = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout[:64]
        path.with_name("state.sha256").write_text(digest + "\n")

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flipped,
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "nothing": lambda path: path.unlink(),
    "no checksum": lambda path: path.with_name("state.sha256").unlink(),
    "a checksum of bytes": lambda path: path.with_name("state.sha256").write_bytes(b"\xff\x00"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "without draft": without("draft"),
    "without optimizers": without("optimizers"),
    "without progress": without("progress"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state_is_passed_over_and_pushes_out_none(tmp_path: Path, kind: str, said: Callable[[], str]) -> None:
    folder = ResumeStates(tmp_path)
    for step in (3, 6):
        folder.save(state_at(step))
    for step in (98, 99):  # whole states whose numbers are beyond those to come, and then are damaged
        shutil.copytree(tmp_path / "step-00000006", tmp_path / f"step-{step:08d}")
        DAMAGE[kind](tmp_path / f"step-{step:08d}" / "state.pt")
    later = ResumeStates(tmp_path)
    found = later.newest()
    assert found is not None and found.progress == state_at(6).progress
    assert torch.equal(found.draft["weight"], torch.full((3,), 6.0))
    assert said().count("is damaged (") == 2
    for step in (9, 12):
        later.save(state_at(step))
        assert (tmp_path / f"step-{step:08d}").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000012"]
    assert ResumeStates(tmp_path).newest() is not None


def test_a_state_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    folder = ResumeStates(tmp_path)
    folder.save(state_at(3))
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000007")
    with pytest.raises(InputError, match="all 1 training states in it are damaged; start again with --restart"):
        ResumeStates(tmp_path).newest()


def test_what_a_run_wrote_itself_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ResumeStates(tmp_path)
    monkeypatch.setattr(torch, "load", None)
    for step in (1, 2, 3, 4):
        folder.save(state_at(step))
    assert len(list(tmp_path.iterdir())) == 2


def test_all_states_damaged_is_an_error_unless_told_to_start_again(
    tiny_verifier: CausalVerifier, tmp_path: Path
) -> None:
    prepared(settings_of(tmp_path), tiny_verifier).run()
    wanted = weights(tmp_path)
    for path in (tmp_path / "run" / STATES).glob("*/state.pt"):
        path.write_bytes(b"gone")
    kept = sorted((tmp_path / "run" / STATES).rglob("*"))
    with pytest.raises(InputError, match="all 2 training states in it are damaged"):
        prepared(settings_of(tmp_path), tiny_verifier)
    assert sorted((tmp_path / "run" / STATES).rglob("*")) == kept
    trainer = prepared(settings_of(tmp_path, restart=True), tiny_verifier)
    assert trainer.progress.step == 0
    trainer.run()
    assert weights(tmp_path) == wanted


def test_a_state_of_another_draft_is_one_line(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """Whole, but of a version whose draft had other tensors."""
    trainer = prepared(settings_of(tmp_path), tiny_verifier)
    trainer.progress.step = 1
    state = trainer.draft.state_dict()
    trainer.folder.resume_states.save(
        ResumeState({**state, "norm.weight": torch.ones(7)}, trainer.optimizers.state_dict(), trainer.progress)
    )
    with pytest.raises(InputError, match=r"its training states do not fit the draft .* start again with --restart"):
        prepared(settings_of(tmp_path), tiny_verifier)


# --- what a folder says it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask_token_id": 101}, ["mask_token_id 100, now asked for 101"]),
        ({"num_layers": 3}, ["num_layers 2, now asked for 3", "contract.draft.causal [False"]),
        ({"lr": 1e-3, "seed": 4}, ["lr 0.002, now asked for 0.001", "seed 0, now asked for 4"]),
    ],
)  # fmt: skip
def test_changed_settings_are_named(
    tiny_verifier: CausalVerifier, tmp_path: Path, changes: dict[str, object], says: list[str]
) -> None:
    prepared(settings_of(tmp_path), tiny_verifier)
    with pytest.raises(InputError) as error:
        prepared(settings_of(tmp_path, **changes), tiny_verifier)
    line = str(error.value)
    assert all(each in line for each in says), line
    assert len(line.replace(str(tmp_path), "")) < 500 and "start again in this one with --restart" in line
    prepared(settings_of(tmp_path, **changes, restart=True), tiny_verifier)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1, 2]", "must hold one JSON object"),
        ('{"facts": [1]}', "facts: [1]: must be an object"),
        ("{}", "facts: None: must be an object"),
        ("", "not valid JSON"),
        ('{"facts": {"lr": NaN}}', "NaN is not valid JSON"),
        (None, "holds training states, but no settings.json"),
    ],
)
def test_a_folder_that_does_not_say_what_it_holds_is_rejected(
    tiny_verifier: CausalVerifier, tmp_path: Path, content: str | None, says: str
) -> None:
    trainer = prepared(settings_of(tmp_path), tiny_verifier)
    trainer.progress.step = 1
    trainer.folder.resume_states.save(trainer._state())
    record = tmp_path / "run" / RECORD
    record.unlink() if content is None else record.write_text(content)
    with pytest.raises(InputError) as error:
        prepared(settings_of(tmp_path), tiny_verifier)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a/../../x", "..", "/tmp/x", "", "."])
def test_a_run_name_stays_inside(tiny_verifier: CausalVerifier, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="--run-name"):
        TrainingPlan(settings_of(tmp_path, run_name=name), tiny_verifier, EXAMPLES)
    TrainingPlan(settings_of(tmp_path, run_name="group/first"), tiny_verifier, EXAMPLES)
    assert not list(tmp_path.iterdir())


# --- accumulated rows -------------------------------------------------------------------------------------------


OBJECTIVES = {
    "dpace": {},
    "decay": {"per_position_loss_weight": "fixed-exp-decay"},
    "progressive": {"per_position_loss_weight": "progressive-decay", "loss_fn": "ce"},
    "kl": {"loss_fn": "kl"},
    "mixed": {"loss_fn": '{"ce": 0.2, "tv": 0.5, "jsd": 0.3}'},
    "dspark": {"speculator_type": "dspark"},
    "dspark, reduced": {"speculator_type": "dspark", "draft_vocab_size": 40, "loss_fn": "kl"},
}


@pytest.fixture(scope="module")
def exact_verifier() -> CausalVerifier:
    return tiny_verifier_of("llama", torch.float64)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("accum", [2, 100])
def test_the_gradient_of_a_step_is_that_of_all_its_rows_at_once(
    exact_verifier: CausalVerifier, tmp_path: Path, kind: str, accum: int
) -> None:
    """One row that holds the examples of all rows, with the same anchors."""
    settings = settings_of(tmp_path, grad_accum=accum, epochs=1.0, total_seq_len=60, **OBJECTIVES[kind])
    plan = TrainingPlan(settings, exact_verifier, EXAMPLES)
    trainer = Trainer.fresh(plan)
    trainer.draft.double()
    rows = [plan.draw(number) for number in plan.rows_of(0)]
    assert len(rows) == min(accum, len(plan.rows)) > 1
    sizes = [int(row.blocks.ends.numel()) for row in rows]
    assert len(set(sizes)) > 1 or len({int((r.blocks.ends - r.blocks.anchors).sum()) for r in rows}) > 1
    loss, metrics = trainer._gradients(0)
    found = {name: p.grad.clone() for name, p in trainer.draft.named_parameters() if p.grad is not None}

    indices = [index for row in rows for index in row.indices]
    starts = [0, *torch.tensor([len(row.packed.tokens) for row in rows]).cumsum(0).tolist()]
    fields = ("anchors", "starts", "ends")
    together = {
        name: torch.cat([getattr(row.blocks, name) + start for row, start in zip(rows, starts, strict=False)])
        for name in fields
    }
    blocks = dataclasses.replace(rows[0].blocks, **together)
    trainer.draft.zero_grad()
    outcome = row_loss(
        trainer.draft, pack_row([plan.train[index] for index in indices]), plan.states.get(indices), blocks,
        plan.objective.at(0.0), whole_head_VE=exact_verifier.head_VE,
    )  # fmt: skip
    outcome.loss.backward()
    assert loss == pytest.approx(float(outcome.loss.detach()), rel=1e-6)
    assert torch.equal(metrics.slots, outcome.metrics.slots)
    for name, parameter in trainer.draft.named_parameters():
        if parameter.grad is not None:
            apart = (found[name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-12)
            assert float(apart) < 1e-6, name


@pytest.mark.parametrize(("accum", "steps"), [(1, 13), (7, 2), (13, 1), (100, 1)])
def test_the_last_step_takes_the_rows_that_are_left(
    tiny_verifier: CausalVerifier, tmp_path: Path, accum: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [random_example(24, 6, i) for i in range(15)]
    settings = settings_of(tmp_path, grad_accum=accum, epochs=1.0, total_seq_len=24, train_data_ratio=0.85)
    plan = TrainingPlan(settings, tiny_verifier, examples)
    plan.rows = [[index % len(plan.train)] for index in range(13)]
    plan.total_steps = -(-13 // accum)
    seen: list[int] = []
    original = TrainingPlan.draw
    monkeypatch.setattr(TrainingPlan, "draw", lambda self, number: seen.append(number) or original(self, number))
    trainer = Trainer.fresh(plan)
    for step in range(plan.total_steps):
        trainer._update(step, 1.0)
    assert plan.total_steps == steps and seen == list(range(13))
    whole = TrainingPlan(settings, tiny_verifier, examples)
    assert whole.total_steps == -(-len(whole.rows) // accum)


# --- a second process, and disks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier's folder, prompts and its own replies to them."""
    root = tmp_path_factory.mktemp("runs")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    own_replies(verifier, f"s={root / 'prompts.jsonl'}", root / "prompts", root / "data", 16)
    return root


def command(workshop: Path, verb: str, folder: Path, *more: object) -> list[str]:
    verifier = ["--verifier-name-or-path", workshop / "verifier"]
    compute = ["--dtype", "float32", "--threads", 1]
    rest = {
        "train": [*compute, "--data-path", workshop / "data", "--num-taps", 2, "--logger", "none", "--epochs", 1],
        "prepare": ["--source", f"s={workshop / 'prompts.jsonl'}", "--prompts-only"],
        "regenerate": [*compute, "--data-path", workshop / "prompts", "--max-new-tokens", 4],
        "quickstart": [*compute, "--max-prompts", 12, "--max-heldout", 2, "--minutes", 0.01],
        "states": [*compute, "--data-path", workshop / "data", "--num-taps", 2],
    }[verb]
    place = "--hidden-states-path" if verb == "states" else "--save-path"
    return [str(each) for each in (verb, *verifier, *rest, place, folder, *more)]


VERBS = ["train", "prepare", "regenerate", "quickstart", "states"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_second_process_on_a_folder_gets_one_line(
    workshop: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom blockdraft.files import locked\n"
        "with locked(Path(sys.argv[1]), '--save-path'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        code, _, err = call(capsys, *command(workshop, verb, tmp_path / "out"))
        assert code == 2 and f"is in use by process {holder.pid}; wait for it" in err, err
        assert len([line for line in err.splitlines() if line.startswith("blockdraft:")]) == 1
        assert "Traceback" not in err and not (tmp_path / "out").exists()
    finally:
        holder.kill()
        holder.wait()
    with locked(tmp_path / "out", "--save-path"):  # a process that was killed holds nothing
        pass


def test_hidden_states_that_are_there_may_be_read_by_many(workshop: Path, tmp_path: Path) -> None:
    maker = InProcess(tiny_verifier_of("llama"), (1, 3))
    HiddenStateFiles(tmp_path / "s", maker).prepare(EXAMPLES)
    with locked(tmp_path / "s", "--hidden-states-path"):
        HiddenStateFiles(tmp_path / "s", maker).prepare(EXAMPLES)
        with pytest.raises(InputError, match="is in use by process"):
            HiddenStateFiles(tmp_path / "s", maker).prepare([*EXAMPLES, random_example(20, 4, 99)])


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["a file", "under a file", "read-only"])
def test_a_place_that_cannot_be_written_is_one_line(
    workshop: Path, tmp_path: Path, verb: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = {"a file": tmp_path / "file", "under a file": tmp_path / "file" / "x", "read-only": Path("/proc/x")}[place]
    code, out, err = call(capsys, *command(workshop, verb, folder))
    assert code == 2 and str(folder) in err and not out, err
    assert err.count("\n") == 1 and "Traceback" not in err
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_logs_that_cannot_be_written_are_found_before_work(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(workshop, "train", tmp_path / "out", "--logger", "tensorboard", "--log-dir", "/proc/x")
    code, _, err = call(capsys, *arguments)
    assert code == 2 and "--log-dir" in err and err.count("\n") == 1


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: to a writer that is a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("verb", ["train", "prepare", "regenerate", "states", "quickstart"])
@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing_half_written(
    workshop: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(workshop, verb, tmp_path / "out")
    with largest_file(1000):
        code, _, err = call(capsys, *arguments)
    line = err.splitlines()[-1]
    assert code == 1 and "Traceback" not in err and re.search("too large|cannot be written", line, re.I), err
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".lock")]
    assert call(capsys, *arguments)[0] == 0


@pytest.mark.parametrize("part", ["checkpoint_best/model.safetensors", "states/*/state.pt"])
def test_a_disk_that_fills_up_in_the_middle_of_training_loses_nothing(
    workshop: Path, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("whole", "full"):
        (tmp_path / name).mkdir()
    arguments = [command(workshop, "train", tmp_path / name / "run") for name in ("whole", "full")]
    assert call(capsys, *arguments[0])[0] == 0
    size = next((tmp_path / "whole" / "run").glob(part)).stat().st_size
    with largest_file(size - 100):
        code, _, err = call(capsys, *arguments[1])
    assert code == 1 and "cannot be written" in err.splitlines()[-1] and "Traceback" not in err, err
    assert not [path for path in (tmp_path / "full").rglob("*") if path.suffix == ".tmp"]
    assert call(capsys, *arguments[1])[0] == 0
    assert weights(tmp_path / "full") == weights(tmp_path / "whole")


# --- the end of a run -------------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_does_nothing(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(workshop, "train", tmp_path / "out", "--json")
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("hidden states were made")

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "get", forbidden)
        code, again, err = call(capsys, *arguments)
    assert code == 0 and json.loads(again) == json.loads(out)
    assert "this run is finished" in err and "--restart" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert call(capsys, *arguments, "--restart")[0] == 0
    assert (tmp_path / "out" / BEST).stat().st_mtime_ns != before[tmp_path / "out" / BEST]
    (tmp_path / "out" / SUMMARY).write_text("[]")
    code, _, err = call(capsys, *arguments)
    assert code == 2 and SUMMARY in err and err.count("\n") == 1


def test_a_run_killed_before_its_summary_only_ends(workshop: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, save_path=tmp_path / "run")
    verifier = tiny_verifier_of("llama")
    wanted = prepared(settings, verifier).run()
    (tmp_path / "run" / SUMMARY).unlink()
    shutil.rmtree(tmp_path / "run" / LAST)
    plan = TrainingPlan(settings, verifier, EXAMPLES)
    assert RunFolder(plan).finished() is None
    assert Trainer.prepare(plan).run() == wanted and RunFolder(plan).finished() == wanted


@pytest.mark.slow
def test_kills_and_a_resume_give_the_same_bits(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 at any moment, by a process that ends itself there."""
    script = (
        "import os, signal, sys\nfrom blockdraft.cli.main import run\n"
        "calls, limit, original = 0, int(sys.argv[1]), os.fsync\n"
        "def sync(descriptor):\n"
        "    global calls\n    calls += 1\n"
        "    if calls == limit:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    original(descriptor)\n"
        "os.fsync = sync\nsys.exit(run(sys.argv[2:]))\n"
    )

    def arguments(name: str) -> list[str]:
        folder = tmp_path / name / "run"
        return command(workshop, "train", folder, "--checkpoint-freq", 0.3, "--total-seq-len", 40)

    for limit in (17, 6):  # in the saves after the first one, of this run and of the next
        started = [sys.executable, "-c", script, str(limit), *arguments("killed")]
        assert subprocess.run(started, capture_output=True).returncode == -signal.SIGKILL
    code, _, err = call(capsys, *arguments("killed"))
    assert code == 0 and "resuming after step" in err
    assert call(capsys, *arguments("whole"))[0] == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_errors_of_a_state_that_cannot_be_written_keep_the_one_before(tmp_path: Path) -> None:
    folder = ResumeStates(tmp_path)
    folder.save(state_at(1))
    blocked = tmp_path / f".step-00000002.{os.getpid()}.tmp"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(BlockdraftError, match="cannot be written"):
        folder.save(state_at(2))
    found = ResumeStates(tmp_path).newest()
    assert found is not None and found.progress.step == 1
