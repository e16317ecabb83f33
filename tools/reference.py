"""The reference pages of the docs site, one a command, made from the settings classes as --help is."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockdraft.cli.verbs import VERBS, Verb
from blockdraft.settings.base import Range, flag_name, type_hints, value_type

INDEX = """# Commands

Every command is `blockdraft COMMAND`. `blockdraft COMMAND --help` prints what these pages say: both are made from the
same settings.

| command | what it does |
|---|---|
{rows}
`blockdraft version` prints the version.

## Common to all commands

- **Recipes.** `--config recipe.yaml` reads settings from a YAML or TOML file: one mapping of flag names, without the
  leading dashes, to values. A flag on the command line wins over the recipe, and the recipe wins over the default.
- **Lists.** A flag that takes several numbers takes them in a row (`--k 1 3 7`). A flag that takes several texts is
  repeated (`--source a=x.jsonl --source b=y.jsonl`). In a recipe both are lists.
- **Switches.** `--decode` turns a switch on, `--no-decode` turns it off.
- **JSON.** `--json` prints the result as one JSON object on stdout. Progress and warnings go to stderr.
- **More and less.** `--verbose` (`-v`) adds details to stderr: settings, device, dtype, files that are read and
  written, times, and where in the code an error was found. `--quiet` (`-q`) leaves only warnings and errors there. Both
  are about what blockdraft says; `VLLM_LOGGING_LEVEL` sets what vLLM logs.
- **Errors.** A mistake is one line that names the setting, its value and what to do.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the command failed, or what it examined failed its proof |
| 2 | wrong use or input; nothing was started |
| 130 | stopped by Ctrl-C or SIGTERM; what was finished is kept |
"""


def pages() -> dict[str, str]:
    """Every reference page by its file name."""
    rows = "".join(f"| [{name}]({name}.md) | {_first_line(verb)} |\n" for name, verb in VERBS.items())
    return {"index.md": INDEX.format(rows=rows), **{f"{name}.md": page(name, verb) for name, verb in VERBS.items()}}


def write(folder: Path) -> None:
    """Write the pages into a folder, and remove pages of commands that are no more."""
    made = pages()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


def page(name: str, verb: Verb) -> str:
    """The page of one command."""
    examples = "\n".join(verb.examples)
    parts = [f"# blockdraft {name}\n", f"{verb.settings.__doc__}\n", f"```bash\n{examples}\n```\n"]
    for title, fields in _sections(verb.settings).items():
        parts.append(f"## {title}\n")
        parts.extend(_entry(field, type_hints(verb.settings)[field.name]) for field in fields)
    parts.append("Recipes (`--config`) and `--json` are [common to all commands](index.md#common-to-all-commands).\n")
    return "\n".join(parts)


def _first_line(verb: Verb) -> str:
    return (verb.settings.__doc__ or "").strip().splitlines()[0]


def _sections(cls: type) -> dict[str, list[dataclasses.Field[Any]]]:
    """The fields of a settings class by the panel of the class that they were written in; a command's own first."""
    panels = {field.name: _panel(cls, field.name) for field in dataclasses.fields(cls)}
    sections: dict[str, list[dataclasses.Field[Any]]] = {"Settings": []}
    for field in sorted(dataclasses.fields(cls), key=_arguments_and_required_first):
        sections.setdefault(panels[field.name], []).append(field)
    return {title: fields for title, fields in sections.items() if fields}


def _panel(cls: type, name: str) -> str:
    for base in cls.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return "Settings" if base is cls else vars(base).get("PANEL", "Settings")
    return "Settings"


def _arguments_and_required_first(field: dataclasses.Field[Any]) -> tuple[bool, bool]:
    return not field.metadata["argument"], field.default is not dataclasses.MISSING


def _entry(field: dataclasses.Field[Any], hint: Any) -> str:
    """A setting as an entry of a definition list: name, what it takes and its default; then its help."""
    if field.metadata.get("unparsed"):
        return f"`[FLAGS OF THE ENGINE]`\n\n:   {_escaped(field.metadata['help'])}\n"
    name = field.name.upper() if field.metadata["argument"] else flag_name(field.name)
    about = ", ".join([_takes(field, hint), *_default(field)])
    return f"`{name}` <small>{about}</small>\n\n:   {_escaped(field.metadata['help'])}\n"


def _escaped(text: str) -> str:
    """Help text as Markdown; what looks like HTML or emphasis stands as it is."""
    return text.replace("<", "&lt;").replace("*", r"\*").replace("[", r"\[")


def _takes(field: dataclasses.Field[Any], hint: Any) -> str:
    wanted, several = value_type(hint)
    if typing.get_origin(wanted) is typing.Literal:
        kind = " | ".join(typing.get_args(wanted))
    else:
        kind = {bool: "switch", int: "whole number", float: "number", Path: "path"}.get(wanted, "text")
    if limits := field.metadata["range"]:
        kind += " " + _range(limits)
    return f"several: {kind}" if several else kind


def _range(limits: Range) -> str:
    if limits.at_least is not None and limits.at_most is not None:
        return f"{limits.at_least:.12g} to {limits.at_most:.12g}"
    return str(limits).removeprefix("must be ")


def _default(field: dataclasses.Field[Any]) -> Iterator[str]:
    """The default, unless the help says what it is."""
    if field.default is dataclasses.MISSING:
        yield "**required**"
    elif isinstance(field.default, bool):
        yield f"default {'on' if field.default else 'off'}"
    elif field.default not in (None, (), ""):
        yield f"default {field.default}"
