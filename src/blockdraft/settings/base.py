"""What a setting is, what values it takes, and how settings are made from flags and recipe files."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.errors import InputError
from blockdraft.files import read_text, reading, reason
from blockdraft.progress import warn

S = TypeVar("S")
RECIPES = Path(__file__).parent.parent / "recipes"  # they come with the package
_INT_LIMIT = 2**31 - 1
_FLOAT_LIMIT = 1e9


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a setting takes."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range; NaN and infinity lie in none."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        low = f"{self.at_least:.12g} or more" if self.at_least is not None else ""
        low = f"above {self.above:.12g}" if self.above is not None else low
        high = f"at most {self.at_most:.12g}" if self.at_most is not None else ""
        high = f"under {self.below:.12g}" if self.below is not None else high
        return "must be " + " and ".join(part for part in (low, high) if part)


def setting(
    default: Any,
    help: str,
    *,
    argument: bool = False,
    identifies: bool = True,
    formerly: str | None = None,
    each: str | None = None,
    **limits: float,
) -> Any:
    """A field with its help text.

    Args:
        argument: it stands on the command line without a flag.
        identifies: it changes the result; False for what says where, how fast or how often.
        formerly: its name in the version before, which still works and warns.
        each: pattern of the values of a tuple of texts, of which several may follow one flag.
        limits: `Range` of a number, or of each number of a tuple.
    """
    return dataclasses.field(
        default=default, metadata=_metadata(help, argument, identifies, formerly=formerly, each=each, limits=limits)
    )


def required(help: str, *, argument: bool = False, identifies: bool = True) -> Any:
    """A field that must be given."""
    return dataclasses.field(metadata=_metadata(help, argument, identifies))


def unparsed(help: str) -> Any:
    """A field for the command-line words that are none of the command's own flags."""
    return dataclasses.field(default=(), metadata=_metadata(help, True, True, unparsed=True))


def _metadata(
    help: str,
    argument: bool,
    identifies: bool,
    *,
    unparsed: bool = False,
    formerly: str | None = None,
    each: str | None = None,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    return {
        "help": help, "argument": argument, "identifies": identifies, "unparsed": unparsed, "formerly": formerly,
        "each": each, "range": Range(**limits) if limits else None,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings: every value is checked when they are made, before any work.

    A subclass with conditions between fields checks them in its own `__post_init__`, after `super().__post_init__()`.
    """

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_value(getattr(self, field.name), hints[field.name], field, spelling(field))


def flag_name(field_name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + field_name.replace("_", "-")


def spelling(field: dataclasses.Field[Any]) -> str:
    """How a user names a field: its flag, or its place on the command line."""
    return "argument " + field.name.upper() if field.metadata["argument"] else flag_name(field.name)


def type_hints(cls: type) -> dict[str, Any]:
    """The types of a settings class's fields."""
    return _type_hints(cls)


@functools.cache
def _type_hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def value_type(hint: Any) -> tuple[Any, bool]:
    """The type that a field's value has, or each of its values, and whether it takes several."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def check(condition: bool, field: str, value: object, hint: str) -> None:
    """Reject a setting's value unless the condition holds."""
    if not condition:
        raise InputError(flag_name(field), value, hint)


def resolved(settings: Any) -> dict[str, Any]:
    """The settings as plain JSON values, to be written beside a result."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def identity(settings: Any) -> dict[str, Any]:
    """Those of `resolved` that change the result."""
    kept = {field.name for field in dataclasses.fields(settings) if field.metadata["identifies"]}
    return {name: value for name, value in resolved(settings).items() if name in kept}


def former_names(cls: type) -> dict[str, str]:
    """Present names of fields by those that they had in the version before."""
    fields = dataclasses.fields(cls)
    return {field.metadata["formerly"]: field.name for field in fields if field.metadata["formerly"]}


def warn_renamed(old: str, new: str) -> None:
    """Say that a name will go."""
    warn(f"{old} is called {new} now; the old name works in this version only")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _check_value(value: Any, hint: Any, field: dataclasses.Field[Any], where: str) -> None:
    if value is None and type(None) in typing.get_args(hint):
        return
    wanted, several = value_type(hint)
    if several and not isinstance(value, tuple):
        raise InputError(where, repr(value), "must be a tuple")
    for item in value if several else (value,):
        if not _is_a(item, wanted):
            raise InputError(where, item if isinstance(item, str) and item else repr(item), _expected(wanted))
        if wanted in (int, float):
            accepted = field.metadata["range"] or Range()
            limit = _INT_LIMIT if wanted is int else _FLOAT_LIMIT
            if accepted.at_most is None and accepted.below is None:
                accepted = dataclasses.replace(accepted, at_most=limit)
            if not accepted.holds(item):
                raise InputError(where, item, str(field.metadata["range"] if abs(item) <= limit else accepted))
        elif wanted in (str, Path):
            _check_text(str(item), where)


def _is_a(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(wanted)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _expected(wanted: Any) -> str:
    if typing.get_origin(wanted) is typing.Literal:
        return "choose one of " + ", ".join(typing.get_args(wanted))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return f"must be {names[wanted]}"


def _check_text(text: str, where: str) -> None:
    if not text:
        raise InputError(where, "''", "must not be empty")
    if "\0" in text:
        raise InputError(where, repr(text), "must not hold a null character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(where, ascii(text), "must be valid Unicode text") from None


def build(cls: type[S], flags: Mapping[str, Any], recipe: Path | None = None) -> S:
    """Make settings from flags (None: not given) over a recipe file over defaults.

    A flag's value may be the text that stood on the command line, and one value of a setting that takes several.

    Raises:
        InputError: an unknown key, a value of the wrong type, or a required setting that nobody gave.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = type_hints(cls)
    for name in flags.keys() - fields.keys():
        near = difflib.get_close_matches(name, fields, 1) or sorted(fields)
        raise InputError(name, flags[name], f"unknown setting; did you mean {', '.join(near)}?")
    given = {
        name: _from_flag(value, hints[name], spelling(fields[name]))
        for name, value in flags.items()
        if value is not None
    }
    values = {**(read_recipe(recipe, cls) if recipe else {}), **given}
    for field in fields.values():
        if field.name not in values and field.default is dataclasses.MISSING:
            raise InputError(spelling(field), "missing", field.metadata["help"])
    return cls(**values)


def _from_flag(value: Any, hint: Any, where: str) -> Any:
    wanted, several = value_type(hint)
    if several:
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_parsed(item, wanted, where) for item in items)
    return _parsed(value, wanted, where)


def _parsed(value: Any, wanted: Any, where: str) -> Any:
    """The text of a flag as the field's type; anything else as it is."""
    if not isinstance(value, str):
        return value
    if wanted is Path:
        _check_text(value, where)
        return Path(value)
    if wanted not in (int, float):
        return value
    try:
        return wanted(value)
    except ValueError:
        shown = repr(value) if len(value) < 80 else f"{value[:60]!r}..."
        raise InputError(where, shown, _expected(wanted)) from None


def read_recipe(path: Path, cls: type) -> dict[str, Any]:
    """Read a YAML or TOML recipe: one mapping of setting names (with dashes or underscores) to values.

    A name without an ending, such as `qwen3-8b.dflash`, means a recipe of the package where there is no such file.

    Raises:
        InputError: it cannot be read, names a setting that `cls` does not have or one twice, or has a value of the
            wrong type.
    """
    raw = _parsed_recipe(path)
    if not isinstance(raw, dict):
        raise InputError("--config", path, "must be a mapping of settings to values")
    hints = type_hints(cls)
    known, former = {field.name for field in dataclasses.fields(cls)}, former_names(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name in former:
            warn_renamed(f"{path}: {key}", former[name].replace("_", "-"))
            name = former[name]
        if name not in known:
            raise InputError("--config", f"{path}: {key}", f"unknown setting; known are {', '.join(sorted(known))}")
        if name in values:
            raise InputError("--config", f"{path}: {key}", "stands there twice")
        values[name] = _from_recipe(value, hints[name], f"{path}: {key}")
    return values


def packaged_recipe(name: str) -> Path:
    """The file of a recipe that comes with the package, such as `qwen3-8b.dflash`.

    Raises:
        InputError: there is none of this name.
    """
    found = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    if name not in found:
        near = difflib.get_close_matches(name, found, 3) or sorted(found)
        raise InputError("--config", name, f"no such file, and no recipe of this name; there are {', '.join(near)}")
    return found[name]


def _parsed_recipe(path: Path) -> Any:
    if not path.exists() and path.suffix not in (".yaml", ".yml", ".toml") and len(path.parts) == 1:
        path = packaged_recipe(path.name)
    text = read_text(path, "--config")
    with reading(path, "--config"):
        if path.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        import yaml

        class Loader(yaml.SafeLoader):
            """Rejects a key that stands twice, which YAML forbids and PyYAML lets pass."""

            def construct_mapping(self, node: Any, deep: bool = False) -> Any:
                keys = [self.construct_object(key, deep=True) for key, _ in node.value]
                twice = next((key for key in keys if keys.count(key) > 1), None)
                if twice is not None:
                    raise ValueError(f"{twice} stands there twice")
                return super().construct_mapping(node, deep)

        try:
            return yaml.load(text, Loader)
        except yaml.YAMLError as error:
            raise ValueError(reason(error)) from None


def _from_recipe(value: Any, hint: Any, where: str) -> Any:
    """A recipe's value as the field's type; int and text such as 1e-3 are accepted for float, a list for a tuple."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    wanted, several = value_type(hint)
    if several:
        if not isinstance(value, list):
            raise InputError("--config", f"{where}: {value!r}", "must be a list")
        return tuple(_one_from_recipe(entry, wanted, where) for entry in value)
    return _one_from_recipe(value, wanted, where)


def _one_from_recipe(value: Any, wanted: Any, where: str) -> Any:
    if wanted is Path and isinstance(value, str) and value:
        return Path(value)
    if wanted is float and isinstance(value, str):  # YAML takes 1e-3 for a text
        try:
            return float(value)
        except ValueError:
            pass
    if not _is_a(value, wanted):
        raise InputError("--config", f"{where}: {value!r}", _expected(wanted))
    return value
