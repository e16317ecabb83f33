"""Where rows come from: `name=path-or-hub-id[:split][@count or weight]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from blockdraft.data.converters import is_converter, names
from blockdraft.errors import InputError

BUILTIN = "builtin/"
_FORM = "name=path-or-hub-id[:split][@count or weight], such as math=gsm8k.jsonl@500 or chat=org/set:train@0.3"
_NAME = re.compile(r"[\w.+-]+")
_SPLIT = re.compile(r"(?P<location>.+):(?P<split>[\w.+-]*(?:\[\d*%?:\d*%?\])?)")


@dataclass(frozen=True, slots=True)
class Source:
    """One source of rows.

    Attributes:
        location: a file, a folder, a hub id, or `builtin/records` and `builtin/chat`.
        split: of a hub data set or a builtin; `[10:20]` takes these rows of a file.
        count: rows to take; None where a weight or nothing was given.
        weight: share of the mixture.
        converter: None finds it by shape.
        revision: the commit of a hub data set, once it was asked for.
    """

    name: str
    location: str
    split: str | None = None
    count: int | None = None
    weight: float | None = None
    converter: str | None = None
    revision: str | None = None


def parse_sources(texts: tuple[str, ...], converters: tuple[str, ...]) -> list[Source]:
    """Sources from their written form, with the converters given as `name=converter`.

    Raises:
        InputError: a form that is not understood, a name used twice, a converter for no source.
    """
    named = dict(_parse_converter(text) for text in converters)
    sources = [_parse(text, named) for text in texts]
    known = [source.name for source in sources]
    for name in known:
        if known.count(name) > 1:
            raise InputError("--source", name, "this name stands for two sources; give each its own")
    for name in named:
        if name not in known:
            raise InputError("--converter", name, f"no source has this name; there are {', '.join(known)}")
    return sources


def _parse(text: str, converters: dict[str, str]) -> Source:
    name, equals, rest = text.partition("=")
    if not equals or not _NAME.fullmatch(name) or not rest:
        raise InputError("--source", text, f"must be {_FORM}")
    count, weight = None, None
    location, at, amount = rest.rpartition("@")
    if at and re.fullmatch(r"\d+", amount):
        count = int(amount)
    elif at and re.fullmatch(r"\d*\.\d+", amount):
        weight = float(amount)
    else:
        location = rest
    if count == 0 or weight == 0:
        raise InputError("--source", text, "0 rows of it; leave it out")
    split = None
    found = _SPLIT.fullmatch(location)
    if found and found["split"] and not Path(location).exists():
        location, split = found["location"], found["split"]
    return Source(name, location, split, count, weight, converters.get(name))


def _parse_converter(text: str) -> tuple[str, str]:
    name, _, converter = text.partition("=")
    if not is_converter(converter):
        raise InputError(
            "--converter",
            text,
            f"must be source=converter: {', '.join(names())}, or two columns as question:answer",
        )
    return name, converter
