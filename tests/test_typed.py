"""JSON values against a dataclass: what may be absent, and what may not be there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from blockdraft.errors import InputError
from blockdraft.typed import checked


@dataclass(frozen=True)
class Facts:
    count: int
    scale: float = 1.0


def test_a_field_with_a_default_may_be_absent() -> None:
    assert checked(Facts, {"count": 3}, "file") == Facts(3)
    assert checked(Facts, {"count": 3, "scale": 2}, "file") == Facts(3, 2)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"scale": 2.0}, "file count: missing"),
        ({"count": 3, "scale": None}, "file scale"),
        ({"count": 3, "other": 1}, "file other: 1: unknown field"),
        ({"count": "3"}, "file count"),
    ],
)
def test_what_is_wrong_is_named(raw: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        checked(Facts, raw, "file")
