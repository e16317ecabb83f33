"""A verifier's folder without the matrices of its layers."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

ENDS = ("embed_tokens", "embeddings", "lm_head", "eoi_embedding")


def keep_parts(source: Path, folder: Path) -> None:
    """Copy a folder with its vectors, its embedding and its output head alone."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json" and path.name != "model.safetensors.index.json":
            shutil.copy(path, folder)
    tensors = {name: t for path in source.glob("*.safetensors") for name, t in load_file(path).items()}
    kept = {name: t for name, t in tensors.items() if t.ndim == 1 or any(end in name.split(".") for end in ENDS)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
