"""Where training curves go."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blockdraft.errors import InputError
from blockdraft.losses.metrics import BlockMetrics
from blockdraft.runtime import memory_gib
from blockdraft.settings import TrainSettings


class MetricsLogger(Protocol):
    """Receives scalars by name."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class NoLogger:
    """Keeps nothing."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        del scalars, step

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Update:
    """What one update of the weights came to, over all processes.

    Attributes:
        grad_norm: before it was clipped.
        tokens: of the rows it learned from.
        seconds, waited: how long it took, and how much of it this process waited for hidden states.
    """

    loss: float
    metrics: BlockMetrics
    grad_norm: float
    tokens: int
    seconds: float = 0.0
    waited: float = 0.0


class LogWindow:
    """The updates since the last line of the log."""

    def __init__(self) -> None:
        self._updates: list[Update] = []

    def add(self, update: Update) -> None:
        self._updates.append(update)

    def taken(self) -> dict[str, float]:
        """The figures of the window, at least one update long; the next one begins."""
        updates, self._updates = self._updates, []
        seconds = max(sum(update.seconds for update in updates), 1e-9)
        return {
            "loss": sum(update.loss for update in updates) / len(updates),
            **functools.reduce(operator.add, (update.metrics for update in updates)).figures(),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "tokens_per_second": sum(update.tokens for update in updates) / seconds,
            "waiting_share": sum(update.waited for update in updates) / seconds,
            "memory_gib": memory_gib(),
        }


def log_folder(settings: TrainSettings) -> Path:
    """Where a run's curves go.

    Raises:
        InputError: the run's name leads out of the folder.
    """
    name = Path(settings.run_name)
    if not name.parts or name.is_absolute() or ".." in name.parts:
        raise InputError("--run-name", repr(settings.run_name), "must be a name, or a path below the log folder")
    return (settings.log_dir or settings.save_path / "logs") / name


def make_logger(kind: str, folder: Path) -> MetricsLogger:
    """The logger of a name that `settings` accepts."""
    return TensorBoardLogger(folder) if kind == "tensorboard" else NoLogger()
