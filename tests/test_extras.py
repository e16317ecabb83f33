"""What a host that serves has to have, and the line that whoever lacks the rest gets."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bare import run_bare
from blockdraft.checkpoints.store import save_draft
from blockdraft.cli.verbs import VERBS
from blockdraft.errors import InputError
from blockdraft.extras import TRAIN, require
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import contract_of, tiny_config, tiny_draft, tiny_verifier_of

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
NEEDED = {"quickstart": (), "prepare": ("--source", "s=builtin/records", "--save-path", "d"),
          "regenerate": ("--data-path", "p", "--save-path", "d"),
          "states": ("--data-path", "p", "--hidden-states-path", "d"),
          "train": ("--data-path", "p", "--save-path", "d", "--mask-token-id", "4")}  # fmt: skip


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", each)[0] for each in requirements}


def test_the_project_and_the_code_have_the_same_extra() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    assert names(extras["train"]) == set(TRAIN)
    assert not names(project["dependencies"]) & set(TRAIN)
    assert "blockdraft[train]" in extras["dev"]


def test_training_without_its_extra_is_one_line() -> None:
    assert NEEDED.keys() == {name for name, verb in VERBS.items() if verb.trains}
    for status, out, said in run_bare(*((name, *more) for name, more in NEEDED.items()), blocked=["datasets"]):
        assert (status, out) == (2, "")
        assert said == "blockdraft: datasets: not installed: pip install 'blockdraft[train]'\n"


@pytest.mark.parametrize("package", TRAIN)
def test_any_package_of_the_extra_can_be_the_missing_one(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(*TRAIN)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"^{package}: not installed"):
        require(*TRAIN)


def test_a_folder_of_the_same_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_a_package_of_ours").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="not installed"):
        require("not_a_package_of_ours")


def test_other_commands_miss_the_extra_only_where_they_need_it(tmp_path: Path) -> None:
    save_folder(tiny_verifier_of("llama"), tmp_path / "verifier")
    verifier = load_verifier(str(tmp_path / "verifier"), torch.float32)
    draft = tiny_draft(verifier, tiny_config())
    save_draft(tmp_path / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    pq.write_table(pa.table({"prompt": ["w1"]}), tmp_path / "prompts.parquet")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n')
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    generate = ("generate", tmp_path / "draft", "--max-new-tokens", "4")
    works = run_bare(
        ("check", tmp_path / "draft"),
        (*generate, "w1 w2"),
        (*generate, "--data-path", tmp_path / "prompts.jsonl"),
        (*generate, "--data-path", tmp_path / "prompts.parquet"),
        ("convert", tmp_path / "model.gguf", "--save-path", tmp_path / "out"),
    )
    assert [status for status, _, _ in works] == [0, 0, 0, 2, 2], works
    for (_, _, said), package in zip(works[3:], ("pyarrow", "gguf"), strict=True):
        assert said.splitlines()[-1] == f"blockdraft: {package}: not installed: pip install 'blockdraft[train]'"
