"""The flags of a recorded training command."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

_FENCED = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
_TRAINING_FLAGS = ("--draft-vocab-size", "--block-size", "--target-layer-ids", "--max-anchors", "--epochs")


@dataclass(frozen=True, slots=True)
class Command:
    """A command as it was recorded.

    Attributes:
        where: the file it stands in.
        flags: the words behind each flag, by its name without dashes, `_` for `-`.
    """

    where: str
    flags: dict[str, list[str]]

    def number(self, name: str) -> float | int | None:
        """The value of a flag as a number; None where it is not given, or no number."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
        return plain(value) if math.isfinite(value) else None

    def numbers(self, name: str) -> list[int] | None:
        """All values of a flag as whole numbers; commas part them as well."""
        words = [part for word in self.flags.get(name, []) for part in re.split(r"[,\s]+", word.strip("[]")) if part]
        return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None

    def text(self, name: str) -> str | None:
        """The first value of a flag."""
        values = self.flags.get(name)
        return values[0] if values else None


def parse_command(text: str, where: str) -> Command | None:
    """A command line, possibly over several lines; None for a text that is none."""
    joined = re.sub(r"\\\s*\n", " ", text)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError:  # an open quotation
        words = joined.split()
    flags: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if re.match(r"--[a-zA-Z]", word):
            name, given, value = word[2:].partition("=")
            values = flags.setdefault(name.replace("-", "_"), [])
            values.extend([value] if given else [])
        elif values is not None:
            values.append(word)
    return Command(where, flags) if flags else None


def commands_of_card(text: str, where: str) -> list[Command]:
    """The training commands in the code blocks of a model card."""
    blocks = [block for block in _FENCED.findall(text) if any(flag in block for flag in _TRAINING_FLAGS)]
    found = (parse_command(block, where) for block in blocks)
    return [command for command in found if command is not None]


def plain(value: Any) -> Any:
    """A number that is whole as an int, so that 3.0 and 3 are one statement."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
