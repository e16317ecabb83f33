"""The resume states of a run: weights, optimizer moments, step and history.

States are folders named by step. A state has a digest of its file beside it, and only one that fits its digest and
has all its parts is ever resumed from. The newest of those are kept: a damaged one is passed over with a warning
and never pushes out a good one. The link `latest` beside the states leads to the newest.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from blockdraft.digests import file_digest
from blockdraft.errors import InputError
from blockdraft.files import link, reason, replacing, write_text, writing
from blockdraft.progress import warn
from blockdraft.training.history import Progress
from blockdraft.typed import checked

LATEST = "latest"
_FILE, _DIGEST = "state.pt", "state.sha256"


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What a run is resumed from.

    Attributes:
        draft, optimizers: what `load_state_dict` takes, on the CPU.
    """

    draft: dict[str, Any]
    optimizers: list[dict[str, Any]]
    progress: Progress

    @classmethod
    def copied(cls, draft: dict[str, Any], optimizers: list[dict[str, Any]], progress: Progress) -> ResumeState:
        """A state of its own on the CPU, which is written while training goes on, and read on any device."""
        own_draft, own_optimizers = tree_map_only(torch.Tensor, _copied, (draft, optimizers))
        return cls(own_draft, own_optimizers, dataclasses.replace(progress))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


class ResumeStates:
    """The resume states of one run. It remembers which of them are whole, so that none is read again to prune."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._whole: set[Path] = set()

    def save(self, state: ResumeState) -> None:
        """Write a state and drop all but the newest `keep` that are whole, the damaged ones included.

        Raises:
            BlockdraftError: the disk is full; the states before are kept.
        """
        content = {
            "draft": state.draft,
            "optimizers": state.optimizers,
            "progress": dataclasses.asdict(state.progress),
        }
        path = self._path(state.progress.step)
        with replacing(path) as temporary:
            with writing(path, RuntimeError):  # torch's writer raises no OSError
                torch.save(content, temporary / _FILE)
            write_text(temporary / _DIGEST, file_digest(temporary / _FILE, str(path)) + "\n")
        self._whole.add(path)
        link(self.folder.parent / LATEST, path)
        self._prune()

    def newest(self) -> ResumeState | None:
        """The newest state that is whole; None where there are no states.

        Raises:
            InputError: there are some, and all of them are damaged.
        """
        found = self._all()
        for path in found:
            try:
                state = _read(path)
            except _DamageError as error:
                warn(f"training state {path.name} is damaged ({error}); falling back to the one before")
                continue
            self._whole.add(path)
            return state
        if found:
            raise InputError(
                "--save-path", self.folder, f"all {len(found)} training states in it are damaged; start again with "
                "--restart, or choose another folder",
            )  # fmt: skip
        return None

    def clear(self) -> None:
        """Remove all states."""
        with writing(self.folder):
            (self.folder.parent / LATEST).unlink(missing_ok=True)
            if self.folder.exists():
                shutil.rmtree(self.folder)
        self._whole.clear()

    def __bool__(self) -> bool:
        """Whether there are states, damaged or not."""
        return bool(self._all())

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _all(self) -> list[Path]:
        """Newest first."""
        found = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=lambda path: (-int(path.name.removeprefix("step-")), path.name))

    def _prune(self) -> None:
        """Keep the newest whole states; those of an earlier run are looked at once."""
        kept = 0
        for path in self._all():
            if kept < self.keep and self._is_whole(path):
                kept += 1
            else:
                _remove(path)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole:
            try:
                _read(path)
            except _DamageError as error:
                warn(f"training state {path.name} is damaged ({error}) and is removed")
                return False
            self._whole.add(path)
        return True


class _DamageError(Exception):
    """What is wrong with a state."""


def _read(path: Path) -> ResumeState:
    """A state that fits its digest and has all its parts."""
    try:
        wanted = (path / _DIGEST).read_text(encoding="ascii").strip()
        if file_digest(path / _FILE, path.name) != wanted:
            raise _DamageError("it does not fit its checksum")
        raw = checked(dict[str, Any], torch.load(path / _FILE, map_location="cpu", weights_only=True), "state")
        draft = checked(dict[str, Any], raw.get("draft"), "draft")
        optimizers = checked(list[dict[str, Any]], raw.get("optimizers"), "optimizers")
        progress = checked(Progress, json.loads(json.dumps(raw.get("progress"))), "progress")
    except FileNotFoundError as error:
        raise _DamageError("without a checksum" if str(error.filename).endswith(_DIGEST) else "no file") from None
    except _DamageError:
        raise
    except Exception as error:  # a damaged archive raises whatever its bytes provoke
        raise _DamageError(reason(error)) from None
    if progress.step != int(path.name.removeprefix("step-")):
        raise _DamageError(f"it is of step {progress.step}")
    return ResumeState(draft, optimizers, progress)


def _remove(path: Path) -> None:
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
