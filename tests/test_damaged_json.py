"""JSON that commands read back, with any value in the place of any other: it is read, or rejected in one line.

BLOCKDRAFT_FUZZ_EXAMPLES is the number of examples of the exhaustive run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file

from blockdraft.checkpoints.speculators import DIGEST
from blockdraft.checkpoints.store import CONFIG, PROVENANCE, WEIGHTS, digest, load_draft, read_checkpoint, save_draft
from blockdraft.cli.tables import show_prepared, show_quickstart, show_training
from blockdraft.data.record import read_record
from blockdraft.data.table import RECORD, read_examples
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import write_json
from blockdraft.pipeline.loading import chat_mode_of
from blockdraft.pipeline.quickstart import earlier_result, planned_epochs
from blockdraft.pipeline.train import plan_of
from blockdraft.settings import TrainSettings
from blockdraft.training.hidden_state_files import RECORD as STATES_RECORD
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.history import SUMMARY, read_summary
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import RECORD as RUN_RECORD
from blockdraft.training.run_folder import RunFolder
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import contract_of, own_replies, random_example, tiny_config, tiny_draft, tiny_verifier_of

Path_ = tuple[str | int, ...]
DELETED = object()
# What damage, other programs and other versions leave behind.
ODD = [
    None, True, False, 0, -1, 3, 10**30, 0.5, -2.5, 1e308, float("nan"), float("inf"), "", "x", "a\nb\u2028c", "\ud800",
    [], [None], ["x"], [0, -1], [[1]], {}, {"x": None}, {"rope_type": "yarn"}, DELETED,
]  # fmt: skip
# What is no JSON object.
NONE = ["", "{", "[]", "null", "7", '"x"', "{} {}", "\ufeff{}", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"]
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**63, 10**400]) | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
) | st.just(DELETED)


@dataclass(frozen=True)
class Kind:
    """A file, what it holds, and what commands do with it."""

    path: Path
    original: dict[str, Any]
    read: Callable[[], object]
    sign: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every value of a JSON example, the example itself first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def changed(example: Any, path: Path_, value: Any) -> Any:
    copied = copy.deepcopy(example)
    if not path:
        return {} if value is DELETED else value
    place = copied
    for key in path[:-1]:
        place = place[key]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copied


def survives(kind: Kind, path: Path_, value: Any) -> bool:
    """Whether the changed file is read. It may be rejected, too, but in no other way than by one line."""
    content = kind.sign(changed(kind.original, path, value))
    kind.path.write_text(json.dumps(content))
    try:
        kind.read()
    except BlockdraftError as error:
        assert len(str(error).splitlines()) == 1 and str(error).encode(), str(error)
        assert len(str(error).replace(str(kind.path.parent), "")) < 1000
        return False
    return True


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    root = tmp_path_factory.mktemp("json")
    save_folder(tiny_verifier_of("llama"), root / "verifier")
    verifier = load_verifier(str(root / "verifier"), torch.float32)
    assert isinstance(verifier, CausalVerifier)
    made = {}
    for name, config in {
        "dspark": tiny_config("dspark", draft_vocab_size=40, windows=(9, None)),
        "dflash": tiny_config("dflash", windows=(9, 9), rope_parameters=YARN),
    }.items():
        made[f"config of {name}"] = checkpoint(root / name, verifier, config)
    made["provenance"] = provenance(root / "dflash")
    made |= data(root, verifier) | run(root, verifier) | hidden_states(root, verifier) | quickstart(root)
    return made


YARN = {"rope_type": "yarn", "rope_theta": 7777.0, "factor": 4.0, "original_max_position_embeddings": 64}


def checkpoint(folder: Path, verifier: CausalVerifier, config: Any) -> Kind:
    draft = tiny_draft(verifier, config)
    save_draft(folder, draft, contract_of(draft, verifier), torch.float32, {"chat": {"thinking": "on", "tools": [{}]}})
    tensors = load_file(folder / WEIGHTS)

    def signed(content: Any) -> Any:
        """As an exporter signs it, unless it cannot."""
        try:
            return {**content, DIGEST: digest(content, tensors)}
        except (TypeError, AttributeError, KeyError):
            return content

    def read() -> None:
        read_checkpoint(folder)
        load_draft(folder, verifier, torch.float32)

    return Kind(folder / CONFIG, json.loads((folder / CONFIG).read_text()), read, signed)


def provenance(folder: Path) -> Kind:
    path = folder / PROVENANCE
    return Kind(path, json.loads(path.read_text()), lambda: chat_mode_of(folder, "trained").options())


def data(root: Path, verifier: CausalVerifier) -> dict[str, Kind]:
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1} w{2 * i}"}]} for i in range(12)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    own_replies(verifier, f"s={root / 'prompts.jsonl'}", root / "prompts", root / "data", 16)
    said = {token for example in read_examples(root / "data", "--data-path") for token in example.input_ids}
    settings = dataclasses.replace(settings_of(root), mask_token_id=max(set(range(128)) - said))

    def read() -> None:
        show_prepared({**read_record(root / "data", "--data-path"), "folder": "somewhere"})
        plan_of(settings, verifier)

    path = root / "data" / RECORD
    return {"data": Kind(path, json.loads(path.read_text()), read)}


def settings_of(root: Path) -> TrainSettings:
    return TrainSettings(
        verifier_name_or_path=str(root / "verifier"), dtype="float32", data_path=root / "data", save_path=root / "run",
        num_taps=2, epochs=1.0, total_seq_len=64, mask_token_id=100, logger="none", num_layers=2,
    )  # fmt: skip


def run(root: Path, verifier: CausalVerifier) -> dict[str, Kind]:
    plan = TrainingPlan(settings_of(root), verifier, [random_example(20, 5, i) for i in range(12)])
    summary = Trainer.prepare(plan).run()
    record = root / "run" / RUN_RECORD
    made = {"run": Kind(record, json.loads(record.read_text()), RunFolder(plan).continues)}
    folder = root / "ended"
    folder.mkdir()

    def show() -> None:
        show_training(read_summary(folder, "--save-path").to_dict())

    return {**made, "summary": Kind(folder / SUMMARY, summary, show)}


def hidden_states(root: Path, verifier: CausalVerifier) -> dict[str, Kind]:
    maker = InProcess(verifier, (1, 3))
    examples = [random_example(20, 5, 1)]
    HiddenStateFiles(root / "states", InProcess(verifier, (1, 2, 3), with_final=True)).prepare(examples)

    def read() -> None:
        HiddenStateFiles(root / "states", maker, "raise").get(examples)

    path = root / "states" / STATES_RECORD
    return {"hidden states": Kind(path, json.loads(path.read_text()), read)}


def quickstart(root: Path) -> dict[str, Kind]:
    """What a quickstart leaves for the next one, as it writes it."""
    result = {
        "verifier": "v", "verifier_folder": "/v", "method": "dflash", "workload": "chat",
        "acceptance_length": {"3": 1.5, "7": 1.6}, "speedup": 1.2, "identical": 3, "heldout_prompts": 3,
        "checkpoint": "/c", "dtype": "bfloat16", "tokens_per_second": {"plain": 10.0, "draft": 12.0}, "failures": ["x"],
        "float32": {"failures": [], "identical": 3, "same_rounds_as_one_pass": 3}, "machine": "m",
        "served_dtype": {"identical": 2, "ties": 1, "mismatches": 0}, "training": {}, "settings": {},
    }  # fmt: skip
    plan = {"seconds_per_step": 0.1, "epochs": 3.0}
    for name, content in (("result", result), ("plan", plan)):
        write_json(root / f"{name}.json", content)
    return {
        "result": Kind(root / "result.json", result, lambda: show_quickstart(earlier_result(root / "result.json"))),
        "plan": Kind(root / "plan.json", plan, lambda: planned_epochs(root / "plan.json")),
    }


# Files, and how long one reading takes: what a checkpoint states is held against tensors that must be read.
SLOW = ("config of dspark", "config of dflash", "data", "hidden states", "run")
NAMES = (*SLOW, "provenance", "summary", "result", "plan")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(kinds: dict[str, Kind], name: str) -> None:
    assert set(kinds) == set(NAMES)
    kind = kinds[name]
    kind.path.write_text(json.dumps(kind.sign(kind.original)))
    kind.read()


@pytest.mark.parametrize("name", NAMES)
def test_every_field_with_every_odd_value(kinds: dict[str, Kind], name: str) -> None:
    kind = kinds[name]
    odd = ODD if name not in SLOW else [*ODD[::3], DELETED]
    rejected = sum(not survives(kind, path, value) for path in places(kind.original) for value in odd)
    assert rejected > 0


@pytest.mark.parametrize("text", NONE, ids=lambda text: repr(text[:8]))
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_none(kinds: dict[str, Kind], name: str, text: str) -> None:
    kind = kinds[name]
    for content in (text.encode(), b"\xff\xfe" + text.encode()):
        kind.path.write_bytes(content)
        with pytest.raises(InputError) as error:
            kind.read()
        assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 1000


def fuzz(kind: Kind, examples: int) -> None:
    every = list(places(kind.original))

    @hypothesis.settings(max_examples=examples, derandomize=True, database=None)
    @hypothesis.given(st.sampled_from(every), VALUES)
    def any_value_in_any_place(path: Path_, value: Any) -> None:
        survives(kind, path, value)

    any_value_in_any_place()


@pytest.mark.parametrize("name", NAMES)
def test_any_value_in_any_place(kinds: dict[str, Kind], name: str) -> None:
    fuzz(kinds[name], 60 if name in SLOW else 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_any_value_in_any_place_for_long(kinds: dict[str, Kind], name: str) -> None:
    fuzz(kinds[name], int(os.environ.get("BLOCKDRAFT_FUZZ_EXAMPLES", "3000")))
