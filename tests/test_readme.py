"""The README's commands run, in order, as they stand there (on fewer prompts and for fewer steps)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import call

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALLER = {
    "prepare": ["--num-rows", "32"],
    "train": ["--epochs", "0.3", "--logger", "none"],
    "evaluate": ["--k", "3", "--max-new-tokens", "12", "--max-prompts", "2"],
    "parity": ["--max-new-tokens", "12", "--max-prompts", "2"],
    "serve": ["--dry-run"],
    "generate": ["--max-new-tokens", "12"],
}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    return [line.split("   #")[0] for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.real
@pytest.mark.engine
def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, one after the other; what a process of its own adds to a command, the tests of it show."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in commands():
        words = shlex.split(command)
        if words[0] != "blockdraft":
            continue
        code, _, err = call(capsys, *words[1:], *SMALLER.get(words[1], []))
        assert code == 0, f"{command}\n{err}"
        ran.append(words[1])
    assert ran == ["convert", "prepare", "regenerate", "train", "evaluate", "parity", "serve", "generate"]
    verifier = json.loads((tmp_path / "runs/draft/checkpoint_best/config.json").read_text())["speculators_config"][
        "verifier"
    ]
    assert Path(verifier["name_or_path"]).is_dir()  # what `vllm serve` will look for


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in commands():
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_flags_named_in_the_text_exist() -> None:
    from blockdraft.cli.verbs import VERBS
    from blockdraft.settings import flag_name

    known = {"--json", "--config", "--help", "--logdir"}
    for verb in VERBS.values():
        known |= {flag_name(name) for name in verb.settings.__dataclass_fields__}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known
