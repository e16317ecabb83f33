"""`blockdraft convert`: a GGUF verifier as an ordinary folder."""

from __future__ import annotations

from typing import Any

import torch

from blockdraft.errors import InputError
from blockdraft.files import require_writable
from blockdraft.settings import ConvertSettings
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.loading import load_verifier, save_folder


def convert(settings: ConvertSettings) -> dict[str, Any]:
    """Write a GGUF verifier as an ordinary folder."""
    if not is_gguf(settings.source):
        raise InputError("source", settings.source, "must be smollm2-135m-instruct or a .gguf file")
    if settings.save_path.exists():
        raise InputError("--save-path", settings.save_path, "exists already; choose a folder that does not")
    require_writable(settings.save_path, "--save-path")
    verifier = load_verifier(settings.source, torch.float32, "cpu")
    save_folder(verifier, settings.save_path)
    return {
        "source": settings.source,
        "architecture": verifier.identity.architecture,
        "folder": str(settings.save_path),
    }
