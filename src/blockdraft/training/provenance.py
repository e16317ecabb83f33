"""What a checkpoint came from, in figures that nobody has to type: a card can only repeat what stands here."""

from __future__ import annotations

import datetime
import importlib.metadata
import shlex
import sys
from typing import Any

import torch

from blockdraft.runtime import machine_description
from blockdraft.version import __version__


def provenance(settings: dict[str, Any], device: torch.device, **facts: Any) -> dict[str, Any]:
    """Command, versions, machine, date and settings, with the facts of the run on a device."""
    packages = ("torch", "transformers", "safetensors")
    return {
        "blockdraft": __version__,
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_description(device),
        "settings": settings,
        **facts,
    }
