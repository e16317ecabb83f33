"""What a setting is, and how settings are made from flags and recipe files."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.errors import InputError

S = TypeVar("S")


def setting(default: Any, help: str, argument: bool = False) -> Any:
    """A field with its help text; an `argument` stands on the command line without a flag."""
    return dataclasses.field(default=default, metadata={"help": help, "argument": argument})


def required(help: str, argument: bool = False) -> Any:
    """A field that must be given."""
    return dataclasses.field(metadata={"help": help, "argument": argument})


def unparsed(help: str) -> Any:
    """A field for the command-line words that are none of the command's own flags."""
    return dataclasses.field(default=(), metadata={"help": help, "argument": True, "unparsed": True})


def flag_name(field_name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field_name.replace("_", "-")


def check(condition: bool, field: str, value: object, remedy: str) -> None:
    """Refuse a setting's value unless the condition holds."""
    if not condition:
        raise InputError(flag_name(field), value, remedy)


def one_of(settings: object, field: str, choices: tuple[str, ...]) -> None:
    """Refuse a setting whose value is none of the choices."""
    check(getattr(settings, field) in choices, field, getattr(settings, field), f"choose one of {', '.join(choices)}")


def at_least(settings: object, minimum: float, *fields: str) -> None:
    """Refuse settings under a minimum."""
    for field in fields:
        check(getattr(settings, field) >= minimum, field, getattr(settings, field), f"must be {minimum:g} or more")


def resolved(settings: Any) -> dict[str, Any]:
    """The settings as plain JSON values, to be written beside a result."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def build(cls: type[S], flags: Mapping[str, Any], recipe: Path | None = None) -> S:
    """Make settings from flags (None: not given) over a recipe file over defaults.

    Raises:
        InputError: an unknown key, a value of the wrong type, or a required setting that nobody gave.
    """
    values = {**(read_recipe(recipe, cls) if recipe else {}), **{k: v for k, v in flags.items() if v is not None}}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values and field.default is dataclasses.MISSING:
            where = "argument " + field.name.upper() if field.metadata["argument"] else flag_name(field.name)
            raise InputError(where, "missing", field.metadata["help"])
    return cls(**values)


def read_recipe(path: Path, cls: type) -> dict[str, Any]:
    """Read a YAML or TOML recipe: one mapping of setting names (with dashes or underscores) to values."""
    import tomllib

    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InputError("--config", path, "no such file") from None
    except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("--config", path, f"cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(raw, dict):
        raise InputError("--config", path, "must be a mapping of settings to values")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    values = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise InputError("--config", f"{path}: {key}", f"unknown setting; known are {', '.join(sorted(known))}")
        values[name] = _converted(value, hints[name], f"{path}: {key}")
    return values


def _converted(value: Any, hint: Any, where: str) -> Any:
    """A recipe's value as the field's type; int is accepted for float and a list for a tuple, nothing else is bent."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, list):
            item = typing.get_args(wanted)[0]
            return tuple(_converted(entry, item, where) for entry in value)
    elif wanted is Path and isinstance(value, str):
        return Path(value)
    elif wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise InputError("--config", f"{where}: {value!r}", f"must be of type {getattr(wanted, '__name__', wanted)}")
