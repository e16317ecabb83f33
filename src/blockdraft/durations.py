"""Spans of time as people write them."""

from __future__ import annotations

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds_of(text: str) -> float | None:
    """Seconds of `3h30m`, `90m`, `1.5h` or `5400`; None for what is no span of time above zero."""
    found = _PARTS.fullmatch(text.strip().lower())
    if found is None:
        return None
    parts = zip(found.groups(), _UNITS.values(), strict=True)
    return sum(float(number) * unit for number, unit in parts if number) or None
