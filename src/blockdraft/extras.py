"""Packages that only data and training need: a host that serves has them no more than it asks for them."""

from __future__ import annotations

import importlib.util

from blockdraft.errors import InputError

TRAIN = ("accelerate", "datasets", "gguf", "pyarrow", "tensorboard")
"""What the extra `train` brings (pyproject.toml)."""


def require(*packages: str) -> None:
    """Reject a machine that lacks a package of the extra `train`, before any work.

    Raises:
        InputError: the first one that is not there.
    """
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder that happens to have its name has no origin
            raise InputError(package, "not installed", "pip install 'blockdraft[train]'")
