"""Is the model behind an address the verifier? A few greedy tokens, the server's against the verifier's own.

The verifier is in this process, in float32. A server in half precision may choose another token where two nearly tie:
that is accepted within what rounding does to this verifier's own logits (`decoding/identity.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from blockdraft.data.journal import Journal, Written
from blockdraft.data.requests import Request
from blockdraft.data.templates import ChatTemplate
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.identity import differences, tie_bound
from blockdraft.errors import InputError
from blockdraft.responses.server import Server, write_replies
from blockdraft.settings import RegenerateSettings, SamplingSettings
from blockdraft.verifiers.base import Verifier

PROMPTS, TOKENS = 4, 16
Tokens = list[int]


def require_author(
    server: Server,
    requests: Sequence[Request],
    template: ChatTemplate,
    settings: RegenerateSettings,
    exact: Verifier,
    rounded: Callable[[], Verifier],
) -> None:
    """Reject a server that does not answer as the verifier does.

    Args:
        requests: the prompts to ask.
        exact: the verifier in float32.
        rounded: loads it in bfloat16, which is needed only where a token differs.

    Raises:
        InputError: the first token that is not the verifier's; or no prompt was answered.
        BlockdraftError: a request failed after all its tries.
    """
    answers = _ask(server, requests, template, settings)
    rejected = [answer.rejected for answer in answers if answer.rejected is not None]
    if answers and len(rejected) == len(answers):
        raise InputError("--endpoint", server.url, f"it answers none of the prompts it was probed with ({rejected[0]})")
    asked = [
        (request.prompt, answer)
        for request, answer in zip(requests, answers, strict=True)
        if answer.rejected is None
    ]  # fmt: skip
    engine = DecodingEngine(exact, None, 0, SamplingSettings(max_new_tokens=TOKENS))
    own = engine.generate([prompt for prompt, _ in asked], PROMPTS)
    pairs = [_comparable(reply, answer, server, template) for reply, (_, answer) in zip(own, asked, strict=True)]
    wanted, found = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    first = next((each for each in differences(exact, wanted, found, 0.0) if not each.is_tie), None)
    if first is None:
        return
    bound = tie_bound(exact, rounded(), own)
    first = next((each for each in differences(exact, wanted, found, bound) if not each.is_tie), None)
    if first is not None:
        raise InputError(
            "--endpoint",
            server.url,
            f"{server.model} does not answer as {exact.identity.name} does (probe {first.prompt + 1}, token "
            f"{first.position + 1}: {first.found} where the verifier has {first.wanted}); serve this verifier, or pass "
            "--no-probe for data of an unknown author",
        )


def _ask(
    server: Server, requests: Sequence[Request], template: ChatTemplate, settings: RegenerateSettings
) -> list[Written]:
    greedy = dataclasses.replace(settings, max_new_tokens=TOKENS, temperature=0.0, top_k=0, top_p=1.0)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Journal(Path(folder) / "probe.db")) as journal:
        write_replies(server, requests, template, greedy, journal)
        answers = [journal.get(request.id, request.turn) for request in requests]
    assert all(answer is not None for answer in answers)
    return [answer for answer in answers if answer is not None]


def _comparable(own: Reply, answer: Written, server: Server, template: ChatTemplate) -> tuple[Reply, Reply]:
    """Both replies as far as both go. A server that gives text only is compared with the verifier's text, encoded anew.

    A reply without any token stays as it is: it differs from every reply that has one.
    """
    tokens = own.tokens
    if not server.gives_ids:
        encode, decode = template.tokenizer, template.tokenizer.decode
        tokens = list(encode(decode(tokens, skip_special_tokens=True), add_special_tokens=False)["input_ids"])
        tokens += [template.tokenizer.eos_token_id] if own.finish == "stop" else []
    length = min(len(tokens), len(answer.tokens))
    wanted, found = (tokens[:length], answer.tokens[:length]) if answer.tokens else (tokens, [])
    return dataclasses.replace(own, tokens=wanted), dataclasses.replace(own, tokens=found)
