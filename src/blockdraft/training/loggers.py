"""Where training curves go."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from blockdraft.errors import InputError
from blockdraft.losses.metrics import BlockMetrics
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


class LogWindow:
    """Losses and metrics of the updates since the last line of the log."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._metrics: list[BlockMetrics] = []

    def add(self, loss: float, metrics: BlockMetrics) -> None:
        self._losses.append(loss)
        self._metrics.append(metrics)

    def taken(self) -> dict[str, float]:
        """The figures of the window, at least one update long; the next one begins."""
        metrics = functools.reduce(operator.add, self._metrics)
        figures = {"loss": sum(self._losses) / len(self._losses), **metrics.figures()}
        self._losses, self._metrics = [], []
        return figures


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
