"""`blockdraft generate` on a terminal: text as it comes, with the draft's share of it colored."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from blockdraft.decoding.engine import Reply
from blockdraft.pipeline.generate import conversations_of
from blockdraft.pipeline.generate import generate as decode
from blockdraft.settings import GenerateSettings

DRAFTED = "bold green"


def generate(settings: GenerateSettings, as_json: bool) -> dict[str, Any]:
    """Decode; a single prompt is streamed, several are printed when all are done."""
    console = Console(highlight=False)
    streaming = not as_json and (len(settings.prompt) == 1 or settings.max_prompts == 1)
    if streaming and not settings.prompt:  # show what is being answered
        console.print(Text(str(conversations_of(settings)[0][-1]["content"]), "dim"))
    shown = 0

    def show(tokenizer: Any, reply: Reply) -> None:
        nonlocal shown
        for piece, drafted in pieces(tokenizer, reply, shown):
            console.print(Text(piece, DRAFTED if drafted and settings.show_drafts else ""), end="", soft_wrap=True)
        shown = len(reply.tokens)
        if reply.finish:
            console.print()

    result = decode(settings, show if streaming else None)
    result["streamed"] = streaming
    if streaming and settings.show_drafts:
        console.print(Text("green", DRAFTED), "was proposed by the draft and accepted by the verifier")
    return result


def pieces(tokenizer: Any, reply: Reply, start: int) -> list[tuple[str, bool]]:
    """Text of the tokens from `start` on, in runs of proposed and other tokens.

    A run is decoded as the difference of two longer decodings, since a token alone may be half a character.
    """
    runs: list[tuple[int, bool]] = []
    for index in range(start, len(reply.tokens)):
        if runs and runs[-1][1] == reply.from_draft[index]:
            runs[-1] = (index + 1, runs[-1][1])
        else:
            runs.append((index + 1, reply.from_draft[index]))
    texts = []
    before = tokenizer.decode(reply.tokens[:start], skip_special_tokens=True)
    for end, drafted in runs:
        after = tokenizer.decode(reply.tokens[:end], skip_special_tokens=True)
        texts.append((after[len(before) :], drafted))
        before = after
    return texts
