"""JSON values of the types that are expected, so that a damaged or foreign file is rejected by the field's name.

What is written as JSON is described once, by the annotations of a dataclass or by a type; reading holds the file
against them. Lists become tuples where a tuple is expected; nothing else is changed.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from blockdraft.errors import InputError

_LARGEST = 2**63  # of whole numbers: what tensors and files hold
_HINT = "the file is damaged, or of another version of blockdraft"


def checked(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the type `hint` has it.

    Args:
        hint: str, int, float, bool, None, Any, a union with None, tuple[x, ...], list[x], dict[str, x]; a dataclass,
            whose fields without a default must be there, and no others than its fields; or a mapping of fields to
            hints, of which those must be there that may not be None, and others may be.
        where: name of the value in errors.

    Raises:
        InputError: another type, NaN or an infinity, a number beyond 64 bits, a missing or an unknown field.
    """
    if isinstance(hint, Mapping):
        raw = checked(dict[str, Any], value, where)
        wanted = {name: each for name, each in hint.items() if name in raw or not _may_be_none(each)}
        return {**raw, **{name: checked(each, raw.get(name), f"{where} {name}") for name, each in wanted.items()}}
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return checked(_option(hint, value), value, where)
    if dataclasses.is_dataclass(hint):
        return _checked_dataclass(hint, value, where)
    if origin in (tuple, list) and isinstance(value, list):
        items = [checked(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict and isinstance(value, dict):
        return {key: checked(typing.get_args(hint)[1], item, f"{where} {key}") for key, item in value.items()}
    if hint is Any or (isinstance(hint, type) and _is_a(hint, value)):
        return value
    raise InputError(where, _shown(value), f"must be {_NAMES.get(origin or hint, 'null')}; {_HINT}")


def _checked_dataclass(cls: Any, raw: Any, where: str) -> Any:
    raw = checked(dict[str, Any], raw, where)
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    for name in sorted(needed - raw.keys()):
        raise InputError(f"{where} {name}", "missing", _HINT)
    for name in sorted(raw.keys() - names):
        raise InputError(f"{where} {name}", _shown(raw[name]), f"unknown field; {_HINT}")
    return cls(**{name: checked(hints[name], raw[name], f"{where} {name}") for name in sorted(names & raw.keys())})


def _option(hint: Any, value: Any) -> Any:
    """The member of a union that a value is held against: the plain type that it has, else the first one."""
    options = typing.get_args(hint)
    return next((option for option in options if isinstance(option, type) and _is_a(option, value)), options[0])


def _may_be_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_a(hint: type, value: Any) -> bool:
    if isinstance(value, bool) or hint is bool:
        return hint is bool and isinstance(value, bool)
    if isinstance(value, int) and abs(value) >= _LARGEST:
        return False
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_NAMES = {
    str: "a string", int: "a whole number", float: "a finite number", bool: "true or false", tuple: "a list",
    list: "a list", dict: "an object",
}  # fmt: skip
