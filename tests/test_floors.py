"""Imports go down only: floor n may import floors below n, and its own; nothing heavy comes with the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "blockdraft"
FLOORS = {
    "settings": 0,
    "ops": 1,
    "losses": 2,
    "models": 2,
    "data": 2,
    "verifiers": 3,
    "checkpoints": 4,
    "decoding": 4,
    "training": 5,
    "vllm_plugin": 5,
    "serving": 6,
    "responses": 7,
    "pipeline": 8,
    "api": 9,
    "cli": 9,
    "__init__": 10,
    "__main__": 10,
}


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "blockdraft" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


def test_every_import_goes_down() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        floor = FLOORS.get(room(path), 0)
        for other in imported_rooms(path):
            if other != room(path) and FLOORS.get(other, 0) >= floor > 0:
                wrong.append(f"{path.relative_to(SOURCE)} imports {other}")
            if floor == 0 and FLOORS.get(other, 0):
                wrong.append(f"{path.relative_to(SOURCE)} (floor 0) imports {other}")
    assert not wrong


def test_every_folder_has_a_floor() -> None:
    folders = {path.name for path in SOURCE.iterdir() if any(path.glob("*.py"))}
    assert folders == set(FLOORS) - {"api", "__init__", "__main__"}  # modules above the ground floor


def test_no_cycle_between_modules() -> None:
    """Of any folder; an import inside a function counts."""
    files = {module_of(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: imported_modules(path, files.keys()) - {name} for name, path in files.items()}
    assert len(graph) > 100 and graph["blockdraft.cli.main"]
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: Collection[str]) -> set[str]:
    """The modules of the package that a file imports anywhere in it; a package only where nothing below is meant."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in below}
    return found & set(known)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from blockdraft.cli.main import run\n"
        "run(['train', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(f'heavy: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_readable() -> None:
    """400 lines a file and 60 a function: a place to cut, before it is a habit."""
    long = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if len(text.splitlines()) > 400:
            long.append(str(path.relative_to(SOURCE)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 65:
                long.append(f"{path.relative_to(SOURCE)}:{node.name}")
    assert not long
