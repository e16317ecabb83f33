"""Why an engine ended, from what it said: one line out of hundreds.

Its processes report one failure several times: the worker with the cause, the engine's core that a worker failed, the
server that the core failed. Every line begins with the process that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KEPT = 600  # last lines that are looked at
LONGEST = 300  # characters of a message
_TAG = re.compile(r"^\((?P<process>[\w. ]+?)(?: pid=\d+)?\) ?(?:[A-Z]+ \S+ \S+ \[\S+\] ?)?")
_RAISED = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?(?P<kind>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Fault))(?:: (?P<text>.*))?$"
)
_USAGE = re.compile(r"^(?:vllm|api_server\.py)[\w. ]*: error: (?P<text>.*)$")
_DIED = re.compile(r"(?:died|exited) unexpectedly")
_NOISE = re.compile(r"nanobind|^ - ")  # what is said when Python shuts down in the middle of something
# What says only that another process failed.
_FOLLOWS = re.compile(
    r"EngineDeadError|EngineGenerateError|Engine core initialization failed|WorkerProc initialization failed"
    r"|Worker failed with error|Executor failed|CancelledError|SystemExit|KeyboardInterrupt|BrokenPipeError|EOFError"
)
_ENGINE = ("EngineCore", "Worker")


def cause(lines: Iterable[str], code: int | None = None) -> str:
    """The first failure of the engine's own processes, else the last of the server; else its last words.

    Args:
        code: exit code of the server; negative: the signal that ended it.
    """
    said = [_parted(line) for line in lines][-KEPT:]
    named = [(process, _raised(said, at)) for at, (process, _) in enumerate(said)]
    found = [(process, text) for process, text in named if text]
    own = [text for process, text in found if process.startswith(_ENGINE)]
    if own:
        return own[0]
    if any(_DIED.search(text) for _, text in said):
        return "a process of its engine ended unexpectedly (out of memory, or killed)"
    if found:
        return found[-1][1]
    if code is not None and code < 0:
        return f"it was ended by signal {-code} (out of memory, or killed)"
    words = (text.strip() for _, text in reversed(said) if text.strip() and not _NOISE.search(text))
    return next(words, "it said nothing")


def _parted(line: str) -> tuple[str, str]:
    """The process that wrote a line, and the line without that."""
    tag = _TAG.match(line)
    return (tag["process"], line[tag.end() :].rstrip()) if tag else ("", line.rstrip())


def _raised(said: list[tuple[str, str]], at: int) -> str:
    """The message of the error that a line names; empty if it is none, or follows from another."""
    text = said[at][1]
    if usage := _USAGE.match(text):
        return usage["text"]
    raised = _RAISED.match(text)
    if raised is None or _FOLLOWS.search(text):
        return ""
    message = (raised["text"] or "").strip()
    if "validation error" in message and at + 1 < len(said):  # pydantic has its reason in the lines behind
        behind = [line.strip() for _, line in said[at + 1 : at + 4]]
        reason = next((line for line in behind if line.startswith("Value error, ")), behind[0] if behind else message)
        message = re.sub(r" \[type=.*$", "", reason.removeprefix("Value error, "))
    short = message if len(message) <= LONGEST else f"{message[:LONGEST]} ..."
    return short if raised["kind"] == "InputError" and short else f"{raised['kind']}: {short}".removesuffix(": ")
