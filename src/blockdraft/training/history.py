"""What a run tells about itself: where it stands, what its validations found, and how it ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.files import read_json, write_json
from blockdraft.typed import checked

SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class Validation:
    """Exact acceptance on the validation examples after some steps."""

    step: int
    seconds: float
    acceptance_length: float
    acceptance_rate: float


@dataclass(slots=True)
class Progress:
    """Where training stands; saved with the state."""

    step: int = 0
    seconds: float = 0.0
    """Spent in updates alone, over all runs that were resumed; validation and saving excluded."""
    best_length: float = 0.0
    history: tuple[Validation, ...] = field(default=())
    rows_per_step: int = 0
    """Rows of an update, over all processes; 0 where an earlier version wrote the state."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes:
        checkpoint: folder of the best one.
    """

    checkpoint: str
    steps: int
    documents: int
    parameters: int
    best_acceptance_length: float
    history: tuple[Validation, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return dataclasses.asdict(self)


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary of the run in a folder."""
    write_json(folder / SUMMARY, summary.to_dict())


def read_summary(folder: Path, field: str) -> Summary:
    """The summary of the run in a folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / SUMMARY
    found: Summary = checked(Summary, read_json(path, field), f"{field} {path}")
    return found
