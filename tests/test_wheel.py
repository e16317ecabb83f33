"""The wheel: what is in it, and that it works where no source tree is, as `pip install` leaves it.

The environment is new and holds the wheel alone. Gigabytes of dependencies are not installed again: a path file lends
those of the suite, whose editable blockdraft stays out, since only a site folder's own path files are read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from blockdraft import __version__

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


def done(*command: object, cwd: Path) -> str:
    """Stdout of a command that must succeed and finds nothing by way of this process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a source distribution has, since the build writes beside it; nothing is downloaded."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(SOURCE, tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    done(*pip, "--wheel-dir", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    done(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    done(*install, wheel, cwd=folder)
    own = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "of_the_suite.pth").write_text("".join(f"{path}\n" for path in sorted(lent)))
    return folder


def test_it_holds_every_file_of_the_package_and_no_local_path(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        content = {name: file.read(name) for name in file.namelist()}
    info = f"blockdraft-{__version__}.dist-info/"
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    files = {path.relative_to(SOURCE).as_posix() for path in files if ".egg-info" not in path.as_posix()}
    assert "blockdraft/py.typed" in files and {name for name in content if not name.startswith(info)} == files
    metadata = content[info + "METADATA"].decode()
    for line in (f"Version: {__version__}", "License-Expression: Apache-2.0", "License-File: LICENSE",
                 "Requires-Python: >=3.11"):  # fmt: skip
        assert f"\n{line}\n" in metadata, line
    assert content[info + "licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    points = content[info + "entry_points.txt"].decode()
    assert "blockdraft = blockdraft.cli.main:main" in points and "[vllm.general_plugins]" in points
    places = {str(path).encode() for path in (ROOT, Path.home(), wheel.parent.parent)} - {b"/"}
    found = [name for name, text in content.items() if any(place + b"/" in text for place in places)]
    assert not found


def test_it_is_what_the_environment_imports(environment: Path, tmp_path: Path) -> None:
    """And nothing else: without the wheel's folder there is no blockdraft."""
    code = (
        "import importlib, importlib.metadata, json, sys\n"
        "import blockdraft\n"
        "points = importlib.metadata.distribution('blockdraft').entry_points\n"
        "[point.load() for point in points]\n"
        "found = {'file': blockdraft.__file__, 'path': sys.path, 'points': sorted(point.group for point in points)}\n"
        "sys.path = [path for path in sys.path if not blockdraft.__file__.startswith(path + '/')]\n"
        "found['else'] = str(importlib.machinery.PathFinder.find_spec('blockdraft'))\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(done(environment / "bin" / "python", "-c", code, cwd=tmp_path))
    assert Path(found["file"]).is_relative_to(environment) and found["else"] == "None"
    assert not {str(ROOT), str(SOURCE)} & set(found["path"])
    assert found["points"] == ["console_scripts", "vllm.general_plugins"]
    assert done(environment / "bin" / "blockdraft", "version", cwd=tmp_path).strip() == __version__


@pytest.mark.real
def test_the_quickstart_runs_from_it_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    """Half a minute of training on a few prompts: every stage, and the proof that the text stays the same."""
    fewer = ("--max-prompts", 24, "--max-heldout", 2, "--max-new-tokens", 24)
    command = (environment / "bin" / "blockdraft", "quickstart", "--minutes", 0.5, *fewer, "--quiet", "--json")
    result = json.loads(done(*command, cwd=tmp_path))
    assert result["failures"] == [] and result["identical"] == result["heldout_prompts"] == 2
    assert result["verifier"] == "smollm2-135m-instruct" and result["training"]["steps"] > 0
    assert Path(result["checkpoint"]).is_relative_to(tmp_path / "runs" / "quickstart")
