"""What a checkpoint came from, in figures that nobody has to type: a card can only repeat what stands here."""

from __future__ import annotations

import datetime
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from blockdraft.runtime import machine_description
from blockdraft.version import __version__


def provenance(settings: dict[str, Any], device: torch.device, **facts: Any) -> dict[str, Any]:
    """Command, versions, machine, date and settings, with the facts of the run on a device."""
    versions = {name: _version(name) for name in ("torch", "transformers", "safetensors", "vllm")}
    return {
        "blockdraft": __version__,
        "source": _source_state(),
        "versions": {name: version for name, version in versions.items() if version is not None},
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_description(device),
        "settings": settings,
        **facts,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_state() -> dict[str, Any] | None:
    """Commit of the git checkout that this package runs from, and whether it was changed since; None elsewhere."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "log", "-1", "--format=%H", "--", ".")
        changes = _git(folder, "status", "--porcelain", "--", "..")
    except (OSError, subprocess.CalledProcessError):
        return None
    if not commit:  # a package in an environment below somebody else's checkout
        return None
    return {"commit": commit, "changed": bool(changes)}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
