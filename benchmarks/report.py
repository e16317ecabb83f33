"""Writes a benchmark's table into its own section of docs/results.md and leaves the other sections alone."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def today() -> str:
    """The date that stands beside a figure."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers `<!-- begin NAME -->` and `<!-- end NAME -->`, or append a section."""
    section = f"<!-- begin {name} -->\n{text.strip()}\n<!-- end {name} -->"
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Results\n"
    pattern = re.compile(rf"<!-- begin {re.escape(name)} -->.*?<!-- end {re.escape(name)} -->", flags=re.DOTALL)
    new = pattern.sub(lambda _: section, old) if pattern.search(old) else f"{old.rstrip()}\n\n{section}\n"
    path.write_text(new, encoding="utf-8")
