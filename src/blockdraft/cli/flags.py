"""From settings classes to command-line flags, so that neither names nor defaults nor help can differ."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from blockdraft.cli.console import set_level
from blockdraft.settings.base import flag_name, former_names, type_hints, value_type, warn_renamed


def command(cls: type, run: Callable[[dict[str, Any], Path | None, bool], None]) -> Callable[..., None]:
    """A function whose signature typer turns into the flags of `cls`, plus those of every command.

    Every flag defaults to None here, which means "not given"; the default itself is applied by `settings.build`.
    """
    hints = type_hints(cls)
    fields = dataclasses.fields(cls)
    panels = _panels(cls)
    ordered = sorted((f for f in fields if not _unparsed(f)), key=_arguments_and_required_first)
    rest = next((field.name for field in fields if _unparsed(field)), None)
    parameters = [_parameter(field, hints[field.name], panels.get(field.name)) for field in ordered]
    parameters.append(
        _option(
            "config",
            Path | None,
            None,
            "YAML or TOML recipe, or the name of one that comes along, such as qwen3-8b.dflash; flags win over it",
        )
    )
    parameters.append(_option("json", bool, False, "print the result as one JSON object on stdout"))
    parameters.append(_option("verbose", bool, False, "also say details: settings, device, files, times", short="-v"))
    parameters.append(_option("quiet", bool, False, "say nothing but warnings and errors", short="-q"))
    if rest is not None:
        parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def function(**values: Any) -> None:
        set_level(values.pop("verbose"), values.pop("quiet"))
        recipe, as_json = values.pop("config"), values.pop("json")
        if rest is not None:
            values[rest] = list(values.pop("context").args)
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v not in (None, [])}
        run(given, recipe, as_json)

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


_CONFIG_HELP = (
    "YAML or TOML recipe, or the name of one of the package's, such as qwen3-8b.dflash; flags given here win over it"
)


def takes_more(cls: type) -> bool:
    """Whether words that are none of the command's own flags are handed on."""
    return any(_unparsed(field) for field in dataclasses.fields(cls))


def _unparsed(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata["unparsed"])


_NUMBER = r"\d+(\.\d+)?|\.\d+"


def list_flags(cls: type) -> dict[str, str]:
    """Flags of `cls` behind which several values may stand, each with the pattern of those after the first."""
    kinds = {name: value_type(hint) for name, hint in type_hints(cls).items()}
    patterns = {}
    for field in dataclasses.fields(cls):
        pattern = _NUMBER if kinds[field.name] in ((int, True), (float, True)) else field.metadata["each"]
        if pattern and not field.metadata["argument"]:
            patterns[flag_name(field.name)] = pattern
    return patterns


def spread_lists(arguments: list[str], flags: Mapping[str, str]) -> list[str]:
    """Turn `--k 1 3 7` into `--k 1 --k 3 --k 7`, as recorded training commands write lists of numbers.

    A flag takes the value behind it, whatever that is, and all that follow and fit its pattern.
    """
    spread: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument not in flags or not rest:
            spread.append(argument)
            continue
        spread += [argument, rest.pop(0)]
        while rest and re.fullmatch(flags[argument], rest[0]):
            spread += [argument, rest.pop(0)]
    return spread


def present_names(arguments: list[str], cls: type) -> list[str]:
    """The words of a command line with former names of flags replaced by those of today, with a warning for each."""
    renamed: dict[str, str] = {}
    for old, new in former_names(cls).items():
        renamed |= {flag_name(old): flag_name(new), flag_name(f"no_{old}"): flag_name(f"no_{new}")}
    present = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            warn_renamed(flag, renamed[flag])
        present.append(renamed.get(flag, flag) + equals + value)
    return present


def _arguments_and_required_first(field: dataclasses.Field[Any]) -> tuple[bool, bool]:
    return not field.metadata["argument"], field.default is not dataclasses.MISSING


def _panels(cls: type) -> dict[str, str]:
    """The help panel of each field: that of the settings class it was written in; a command's own need none."""
    panels: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not cls and "PANEL" in vars(base):
            panels |= dict.fromkeys(inspect.get_annotations(base), vars(base)["PANEL"])
        elif base is cls:
            for name in inspect.get_annotations(base):
                panels.pop(name, None)
    return panels


def _parameter(field: dataclasses.Field[Any], hint: Any, panel: str | None) -> inspect.Parameter:
    wanted, several = value_type(hint)
    # Values stay text here: one place, `settings.base`, turns them into numbers and paths and says what is wrong.
    hint = bool if wanted is bool else list[str] if several else str
    help_text = field.metadata["help"]
    if field.default is dataclasses.MISSING:
        help_text += " (required)"
    elif field.default not in (None, (), ""):
        help_text += f" (default: {field.default})"
    if field.metadata["argument"]:
        marker: Any = typer.Argument(help=help_text, show_default=False)
        return _keyword(field.name, hint | None, marker, None)
    return _option(field.name, hint | None, None, help_text, panel, _metavar(wanted))


def _metavar(wanted: Any) -> str | None:
    if typing.get_origin(wanted) is typing.Literal:
        return "WORD"  # the help names them all
    return {bool: None, int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(wanted, "TEXT")


def _option(
    name: str,
    hint: Any,
    default: Any,
    help_text: str,
    panel: str | None = None,
    metavar: str | None = None,
    short: str | None = None,
) -> inspect.Parameter:
    flag = flag_name(name)
    names = (f"{flag}/--no-{flag[2:]}",) if hint == bool | None else (flag,)
    option = typer.Option(
        *names, *((short,) if short else ()), help=help_text, show_default=False, rich_help_panel=panel, metavar=metavar
    )
    return _keyword(name, hint, option, default)


def _keyword(name: str, hint: Any, marker: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, marker])
