"""Imports go down only: floor n may import floors below n, and its own; nothing heavy comes with the package."""

from __future__ import annotations

import ast
import subprocess
import sys
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
    "serving": 5,
    "training": 5,
    "pipeline": 6,
    "api": 7,
    "cli": 7,
    "__init__": 8,
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
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(FLOORS) - {"api", "__init__"}  # modules above the ground floor


def test_no_cycle_between_modules_of_floor_zero() -> None:
    graph = {p.stem: imported_rooms(p) - {p.stem} for p in SOURCE.glob("*.py")}
    done: set[str] = set()
    while graph:
        free = [name for name, needs in graph.items() if not (needs & graph.keys())]
        assert free, f"cycle among {sorted(graph)}"
        for name in free:
            done.add(name)
            del graph[name]


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
