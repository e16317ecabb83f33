"""Entry point. Exit codes: 0 done, 1 failed, 2 wrong use or input (one line, no traceback),
75 stopped before the end with everything saved (the same command goes on), 130 interrupted."""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import typer

from blockdraft.cli.console import console
from blockdraft.cli.flags import command, list_flags, present_names, spread_lists, takes_more
from blockdraft.cli.verbs import VERBS, Verb
from blockdraft.errors import BlockdraftError
from blockdraft.files import reason
from blockdraft.progress import LOGGER, warn
from blockdraft.runtime import prepare_environment, process_place, resolve_device
from blockdraft.settings import ComputeSettings, build, resolved
from blockdraft.version import __version__

INTERRUPTED = 130
# typer brings its own copy of click and names only this subclass of the error that every wrong use raises.
_USAGE_ERROR: Any = typer.BadParameter.__base__


@functools.cache
def make_app() -> typer.Typer:
    """The typer application with one command a verb."""
    app = typer.Typer(
        name="blockdraft",
        help="Train, prove, export and serve block-diffusion draft models for speculative decoding.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
    )

    @app.callback()
    def root() -> None:  # a callback keeps typer from making a lone verb the program itself
        pass

    for name, verb in VERBS.items():
        examples = "\n\n".join(f"[dim]$[/dim] {example}" for example in verb.examples)
        help_text = f"{verb.settings.__doc__}\n\n[bold]Examples[/bold]\n\n{examples}"
        more = {"allow_extra_args": True, "ignore_unknown_options": True} if takes_more(verb.settings) else {}
        app.command(name, help=help_text, context_settings=more)(command(verb.settings, _runner(verb)))

    @app.command("version")
    def version() -> None:
        """Print the version."""
        print(__version__)

    return app


def _runner(verb: Verb) -> Any:
    def run(flags: dict[str, Any], recipe: Path | None, as_json: bool) -> None:
        start = time.monotonic()
        settings: Any = build(verb.settings, flags, recipe)
        LOGGER.debug("blockdraft %s, settings %s", __version__, resolved(settings))
        if isinstance(settings, ComputeSettings):
            LOGGER.debug("device %s", resolve_device(settings.device))  # a wrong one is known before any work
        try:
            result = verb.run(settings, as_json)
        except KeyboardInterrupt as stopped:  # here, since typer would swallow what it says
            warn(f"blockdraft: {str(stopped) or 'interrupted'}")
            raise typer.Exit(INTERRUPTED) from None
        LOGGER.debug("done in %.1f s", time.monotonic() - start)
        if process_place()[0] > 0:  # the first process shows what all of them came to
            return
        if as_json:
            print(json.dumps(result, ensure_ascii=False))
        else:
            verb.display(result)
        if result.get("failures"):  # the command worked, and what it examined failed
            raise typer.Exit(1)

    return run


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    prepare_environment()
    with console():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in VERBS:
        verb, cls = arguments[0], VERBS[arguments[0]].settings
        arguments = [verb, *spread_lists(present_names(arguments[1:], cls), list_flags(cls))]
    try:
        code = make_app()(arguments, standalone_mode=False)
    except BlockdraftError as error:
        LOGGER.error("blockdraft: %s", error)
        LOGGER.debug("where it was found", exc_info=error)
        return error.exit_code
    except _USAGE_ERROR as error:
        LOGGER.error("blockdraft: %s", error.format_message())
        return 2
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        sys.stdout = None
        return 1
    except OSError as error:  # a disk that fills up, a folder that goes away
        LOGGER.error("blockdraft: %s: %s", error.filename or "the system", reason(error))
        LOGGER.debug("where it was found", exc_info=error)
        return 1
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
