"""The Python interface: the page about it runs as it stands there, its names are typed, mistakes are one line."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blockdraft
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import own_replies, tiny_verifier_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
MASK = 4  # of the page; no text of the tiny verifier may have it


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page finds in place: runs/verifier and runs/data."""
    root = tmp_path_factory.mktemp("api")
    silent_on_mask = tiny_verifier_of("llama")
    silent_on_mask.model.lm_head.weight.data[MASK] = 0  # a logit of 0 is never the highest
    save_folder(silent_on_mask, root / "runs" / "verifier")
    verifier = load_verifier(str(root / "runs" / "verifier"), torch.float32)
    rows = [{"prompt": f"w{i} w{i + 1} w{2 * i}"} for i in range(2, 34)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own_replies(verifier, f"s={root / 'prompts.jsonl'}", root / "runs" / "prompts", root / "runs" / "data", 24)
    return root


def test_the_example_of_the_page_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's first block, word for word; nothing is printed that it does not print."""
    monkeypatch.chdir(workplace)
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    names: dict[str, object] = {}
    capsys.readouterr()
    exec(compile(code, "python.md", "exec"), names)
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith("{3: ") and captured.out.count("\n") == 3
    run, found, reply = names["run"], names["found"], names["reply"]
    assert isinstance(run, blockdraft.Summary) and Path(run.checkpoint).is_dir() and run.steps > 0
    assert isinstance(found, blockdraft.Evaluation) and set(found.acceptance) == {3, 7} and found.failures == ()
    assert found.acceptance[7].acceptance_length == found.report["acceptance"]["7"]["acceptance_length"]
    assert isinstance(reply, blockdraft.Reply) and reply.rounds and reply.finish
    pair = names["pair"]
    assert isinstance(pair, blockdraft.Pair)
    plain = blockdraft.DecodingEngine(pair.verifier, None, k=0).generate([reply.prompt])
    assert plain[0].tokens == reply.tokens


def test_settings_may_be_objects_and_a_verifier_may_be_shared(workplace: Path) -> None:
    verifier = blockdraft.load_verifier(str(workplace / "runs" / "verifier"), dtype="float32")
    settings = blockdraft.TrainSettings(
        data_path=workplace / "runs" / "data", save_path=workplace / "shared", epochs=0.5, mask_token_id=MASK,
        logger="none",
    )  # fmt: skip
    run = blockdraft.train(settings, verifier=verifier)
    pair = blockdraft.load_draft(run.checkpoint, verifier)
    assert pair.verifier is verifier
    found = blockdraft.evaluate(
        blockdraft.EvaluateSettings(checkpoint=Path(run.checkpoint), data_path=workplace / "runs" / "data", k=(1,))
    )
    assert found.acceptance[1].rounds > 0
    with pytest.raises(blockdraft.InputError, match=r"^k: 8: must be 0 to 7; "):
        blockdraft.DecodingEngine(pair.verifier, pair.draft, k=8)
    with pytest.raises(blockdraft.InputError, match=r"^k: 1: must be 0 to 0; 0 decodes without a draft"):
        blockdraft.DecodingEngine(pair.verifier, None, k=1)
    with pytest.raises(blockdraft.InputError, match=r"^dtype: float32: is the given verifier's"):
        blockdraft.load_draft(run.checkpoint, verifier, dtype="float32")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: blockdraft.train(data_pth="d", save_path="s"),
            r"data_pth: d: unknown .* did you mean data_path",
        ),
        (lambda: blockdraft.train(data_path="d"), r"--save-path: missing: folder"),
        (lambda: blockdraft.train(data_path="d", save_path="s", epochs=-1), r"--epochs: -1: must be above 0"),
        (lambda: blockdraft.train(data_path="d", save_path="s", epochs="many"), r"--epochs: 'many': must be a number"),
        (
            lambda: blockdraft.train(data_path="d", save_path="s", dry_run=True),
            r"dry_run: True: belongs to the",
        ),
        (lambda: blockdraft.train(data_path=3, save_path="s"), r"--data-path: 3: must be a path"),
        (lambda: blockdraft.evaluate(checkpoint="none-here", k=3), r"checkpoint: none-here: no such folder"),
        (lambda: blockdraft.evaluate(checkpoint="c", k="x"), r"--k: 'x': must be a whole number"),
        (lambda: blockdraft.load_draft("none-here"), r"checkpoint: none-here: no such folder"),
        (lambda: blockdraft.load_draft("c", dtype="int8"), r"--dtype: int8: choose one of"),
        (lambda: blockdraft.load_verifier("./none-here"), r"--verifier-name-or-path: ./none-here: no model folder"),
        (
            lambda: blockdraft.evaluate(blockdraft.EvaluateSettings(checkpoint=Path("c")), k=(1,)),
            r"k: \(1,\): give it in EvaluateSettings",
        ),
    ],
)
def test_mistakes_are_one_line(call: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert callable(call)
    with pytest.raises(blockdraft.errors.InputError, match=f"^(argument )?{says}") as error:
        call()
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_importing_it_is_cheap_and_every_name_is_there() -> None:
    code = (
        "import sys, blockdraft\n"
        "heavy = {'torch', 'transformers', 'numpy', 'typer', 'rich', 'blockdraft.settings'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(blockdraft.__all__) <= set(dir(blockdraft))\n"
        "assert issubclass(blockdraft.InputError, blockdraft.errors.BlockdraftError)\n"
        "blockdraft.TrainSettings, blockdraft.errors\n"
        "assert 'torch' not in sys.modules\n"
        "[getattr(blockdraft, name) for name in blockdraft.__all__]\n"
        "assert not hasattr(blockdraft, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_what_is_there() -> None:
    """What is imported for type checkers is what `__getattr__` gives, from the same modules."""
    tree = ast.parse((ROOT / "src" / "blockdraft" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        home = node.module.removeprefix("blockdraft").removeprefix(".")
        typed |= {alias.name: home or alias.name for alias in node.names}
    assert typed == blockdraft._HOME and sorted(typed) == blockdraft.__all__


def test_the_page_names_all_of_it() -> None:
    table = PAGE.split("## Names")[1].split("##")[0]
    named = set(re.findall(r"`(\w+)", table))
    assert set(blockdraft.__all__) - {"errors"} <= named
