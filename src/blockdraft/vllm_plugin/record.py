"""A record of what a served draft proposed: JSON lines, one for each block.

The plugin writes it when BLOCKDRAFT_RECORD names a file (`blockdraft serve --record`); parity reads it. A line has the
engine's request id, the anchor's position in the sequence, and the proposed tokens as verifier ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

RECORD_PATH = "BLOCKDRAFT_RECORD"

Blocks = dict[int, list[int]]
"""Proposed tokens by the anchor's position."""


def append(path: Path, requests: Sequence[str], anchors: Sequence[int], drafted: Sequence[list[int]]) -> None:
    """Add the blocks of one step."""
    lines = [
        json.dumps({"request": request, "anchor": anchor, "drafted": tokens}) + "\n"
        for request, anchor, tokens in zip(requests, anchors, drafted, strict=True)
    ]
    with path.open("a", encoding="utf-8") as handle:
        handle.write("".join(lines))


def read(path: Path) -> dict[str, Blocks]:
    """Blocks by request. After a preemption a request proposes again at anchors it had before; the last one counts."""
    found: dict[str, Blocks] = {}
    if path.is_file():
        for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
            entry = json.loads(line)
            found.setdefault(entry["request"], {})[entry["anchor"]] = entry["drafted"]
    return found
