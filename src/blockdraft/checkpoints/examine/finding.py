"""What a check of a checkpoint finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from blockdraft.checkpoints.examine.facts import CheckpointFacts

Level = Literal["error", "warning", "not checked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One contradiction, or one thing that could not be looked at.

    Attributes:
        check: name of the check.
        field: what is wrong, with its file.
        value: what stands there.
        hint: what contradicts it, and what to do.
    """

    level: Level
    field: str
    value: str
    hint: str
    check: str = ""

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.check}: {self.field}: {self.value}: {self.hint}"

    def to_dict(self) -> dict[str, str]:
        """A JSON-ready dictionary."""
        return asdict(self)


Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A question about a checkpoint.

    Attributes:
        question: for the table in the docs.
        run: the findings about the facts of a checkpoint.
    """

    name: str
    question: str
    run: Callable[[CheckpointFacts], Findings]


class Statement(NamedTuple):
    """A value and where it stands."""

    where: str
    value: Any


def error(field: str, value: object, hint: str) -> Finding:
    """A contradiction."""
    return Finding("error", field, str(value), hint)


def warning(field: str, value: object, hint: str) -> Finding:
    """Something that misleads a reader, or will."""
    return Finding("warning", field, str(value), hint)


def not_checked(field: str, why: str, hint: str) -> Finding:
    """Something that could not be looked at."""
    return Finding("not checked", field, why, hint)


def agree(statements: list[Statement], hint: str) -> Findings:
    """An error for each statement that differs from the first; those without a value say nothing."""
    stated = [each for each in statements if each.value is not None]
    for each in stated[1:]:
        if each.value != stated[0].value:
            yield error(each.where, each.value, f"{stated[0].where} says {stated[0].value}; {hint}")
