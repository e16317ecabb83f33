"""The resumable state of a run: weights, optimizer moments, step and history.

States are folders named by step. The two newest are kept: a state that a crash or a full disk has damaged is passed
over, said aloud, for the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from blockdraft.files import replacing
from blockdraft.progress import say

_FILE = "state.pt"
_KEPT = 2


def save_state(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write the state after `step` updates and drop all but the newest two.

    Tensors are written from the CPU, so that a run resumes on another device than the one it was stopped on.
    """
    state = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    with replacing(folder / f"step-{step:08d}") as temporary:
        torch.save(state, temporary / _FILE)
    for old in sorted(folder.glob("step-*"))[:-_KEPT]:
        shutil.rmtree(old)


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest state that can be read, or None where there is none."""
    for candidate in sorted(folder.glob("step-*"), reverse=True):
        try:
            return torch.load(candidate / _FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive raises whatever its bytes provoke
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            say(f"training state {candidate.name} is damaged ({reason}); falling back to the one before")
    return None
