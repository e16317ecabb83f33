"""Requests that a server must answer with 200 or 4xx: odd values of every field, odd prompts, aborts.

`bodies` makes them from a seed, first each value of each field alone, then pairs of fields. `fuzz` sends them. Replies
whose tokens are decided by the verifier alone are compared with those of a server without a draft.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

WORKERS, ABORTED = 8, 0.08  # requests at a time, and the share of which the client hangs up
NAN, INF = float("nan"), float("inf")
WRONG: tuple[Any, ...] = ("x", "", [], {}, [None], True, None, NAN, INF, -INF, 10**400, -(10**20), 1e308, [[1]])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

# Values that a client may mean, with their limits and just beyond; WRONG is tried for every field as well.
FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 1, 0.7, 2, 1e-45, 1e-6, 0.009, -1, 1e30),
    "top_p": (1, 0.5, 1e-9, 0, -0.1, 1.1, 0.999999),
    "top_k": (5, 1, 0, -1, -2, 999, 1000, 1001, 2**31, 2**63, 2.5),
    "min_p": (0, 0.1, 1, -0.1, 1.5),
    "seed": (0, 7, -1, 2**63 - 1, 2**63, -(2**63), 1.5),
    "n": (1, 2, 3, 0, -1, 10**9),
    "max_tokens": (1, 2, 9, 33, 0, -1, 255, 256, 10**9, 2**70),
    "min_tokens": (0, 1, 5, 33, -1, 10**9),
    "stop": ("w1", ["w1", "w2"], "", [""], [1], "\ud800", "x" * 5000),
    "stop_token_ids": ([], [5, 6], [-1], [999], [1000], [10**9], [2**70], ["a"]),
    "ignore_eos": (True, False, 3),
    "include_stop_str_in_output": (True,),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (False,),
    "repetition_penalty": (1, 1.3, 0.1, 0, -1, 1e9, 1e-9),
    "presence_penalty": (0, 1.5, -2, 2, 3, -3),
    "frequency_penalty": (0, 1.5, -2, 2, 3, -3),
    "logprobs": (0, 1, 5, 20, 21, -1, -2, 1000, 10**9),
    "prompt_logprobs": (0, 1, 20, -1, -2, 1000, 10**9),
    "logprob_token_ids": ([1, 2], [999], [1000], [-1], [10**9], []),
    "logit_bias": ({}, {"5": 10}, {"5": -100}, {"999": 1}, {"1000": 1}, {"x": 1}, {"-1": 1}, {"5": NAN}),
    "allowed_token_ids": ([5, 6, 7], [5], [], [999], [1000], [-1], [10**9]),
    "bad_words": ([], ["w1"], ["w1 w2"], [""], ["w1", "nonsense"], ["\ud800"]),
    "echo": (True,),
    "suffix": ("w3",),
    "best_of": (2,),
    "use_beam_search": (True,),
    "length_penalty": (0.5, -1, -INF, NAN),
    "truncate_prompt_tokens": (1, 3, 0, -1, -2, 10**9),
    "add_special_tokens": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (True,),
    "stream": (True,),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True, "include_usage": True}, {"x": 1}),
    "response_format": (
        {"type": "text"}, {"type": "json_object"}, {"type": "x"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
    ),
    "structured_outputs": (
        {"choice": ["w1", "w2"]}, {"choice": []}, {"regex": "w[0-9]+"}, {"regex": "("}, {"json": SCHEMA}, {"json": "{"},
        {"grammar": 'root ::= "w1" | "w2"'}, {"grammar": "x"}, {"regex": "a", "choice": ["b"]}, {"structural_tag": "x"},
    ),
    "priority": (0, 1, -1),
    "request_id": ("same", ""),
    "cache_salt": ("a", "", "x" * 2000),
    "vllm_xargs": ({"a": 1}, {"a": {"b": 1}}),
    "kv_transfer_params": ({"a": 1},),
    "thinking_token_budget": (0, 5, -1),
    "repetition_detection": ({"max_pattern_size": 2, "min_count": 2}, {"max_pattern_size": -1}, {"x": 1}),
    "user": ("me",),
    "model": ("another",),
    "nonsense": (1,),
}  # fmt: skip

# What vLLM rejects with any draft.
WITHOUT_DRAFT_ONLY = ("logit_bias", "min_p", "logprob_token_ids")
# Together they may leave no token at all; vLLM answers such a request with 500, with and without a draft.
GRAMMARS, EXCLUSIONS = ("structured_outputs", "response_format"), ("allowed_token_ids", "bad_words", "min_tokens")


def prompts(vocab_size: int, longest: int, special: Iterable[int]) -> list[Any]:
    """Prompts of all shapes, for a model of so many tokens and so long a context."""
    ids = [5 + i % 80 for i in range(longest + 8)]
    return [
        "w5 w6 w7", [5, 6, 7], [9] * 40, ids[: longest - 20], ids[: longest - 1], ids[:longest], ids, ids * 50,
        "", " ", "\n", [], [[]], [""], None, 5, 5.5, True, {}, [None], ["w1", "w2"], ["w1", 5], [5, "w1"],
        [[5, 6], [7]], [[5], []], [[5], "w1"], [[[5]]], [vocab_size - 1], [vocab_size], [5, vocab_size + 400], [-1],
        [5, -3], [2**31], [2**63], [2**70], [5.5], [1e30], [NAN], [True], "\ud800", "a\udfffb", "\x00", "\u2028",
        "🙂" * 20, "w1 " * 3000, list(special), [list(special)], *([each] for each in special),
        "<pad>", "<end>", "<end><end>", "<unk>",
    ]  # fmt: skip


def bodies(
    seed: int, odd_prompts: list[Any], usual: list[list[int]], fields: Iterable[str] = tuple(FIELDS)
) -> Iterator[dict[str, Any]]:
    """Bodies without end: each prompt, each value alone, then pairs of fields, which begin with usual values."""
    draw = random.Random(seed)
    names = [name for name in FIELDS if name in set(fields)]
    base = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    alone = [{"prompt": prompt} for prompt in odd_prompts]
    alone += [{name: value} for name in names for value in (*FIELDS[name], *WRONG)]
    draw.shuffle(alone)
    for changes in alone:
        yield {**base, "prompt": draw.choice(usual), **changes}
    while True:
        pairs = list(itertools.combinations(names, 2))
        draw.shuffle(pairs)
        for pair in pairs:
            changes = {name: draw.choice(FIELDS[name] if draw.random() < 0.9 else WRONG) for name in pair}
            prompt = draw.choice(usual) if draw.random() < 0.9 else draw.choice(odd_prompts)
            # Most fields take another path in a step in which something is drawn.
            yield {**base, "temperature": draw.choice([0, 0, 1]), "prompt": prompt, **changes}


Choices = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Status (within a stream, that of its error) and, of an answered request, tokens and ends of its choices.

    A status of 0: the client hung up.
    """

    status: int
    said: str
    choices: Choices = ()

    @property
    def failed(self) -> bool:
        """Whether the server blames itself."""
        return self.status >= 500


def ask(http: httpx.Client, path: str, body: dict[str, Any], abort: bool = False) -> Answer:
    """Send one body as JSON, with what JSON has no words for as Python writes it.

    Args:
        abort: stream, and hang up after the first piece.
    """
    content = json.dumps({**body, "stream": True} if abort else body).encode()
    with http.stream("POST", path, content=content, headers={"content-type": "application/json"}) as answer:
        if abort and answer.status_code == 200:
            next(answer.iter_lines(), None)
            return Answer(0, "")
        said = answer.read().decode()
        if answer.status_code != 200:
            return Answer(answer.status_code, said)
    return _streamed(said) if said.startswith("data:") else Answer(200, said, _whole(json.loads(said)))


def _whole(answer: dict[str, Any]) -> Choices:
    return tuple((tuple(each.get("token_ids") or ()), str(each.get("finish_reason"))) for each in answer["choices"])


def _streamed(said: str) -> Answer:
    """A stream, put together."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for line in said.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                return Answer(int(event["error"].get("code") or 500), str(event["error"].get("message")))
            for each in event["choices"]:
                tokens.setdefault(each["index"], []).extend(each.get("token_ids") or ())
                ends[each["index"]] = str(each.get("finish_reason"))
    return Answer(200, said, tuple((tuple(tokens[index]), ends[index]) for index in sorted(tokens)))


def is_decided(body: dict[str, Any]) -> bool:
    """Whether the verifier alone decides the tokens of a reply."""
    temperature = body.get("temperature")
    return temperature == 0 and temperature is not False and not body.get("use_beam_search")


def leaves_no_token(body: dict[str, Any]) -> bool:
    """Whether a grammar and another field of a body may exclude all tokens between them."""
    return any(name in body for name in GRAMMARS) and any(name in body for name in EXCLUSIONS)


def _asked(http: httpx.Client, path: str, body: dict[str, Any], abort: bool = False) -> Answer:
    """`ask`, and once more where the server had just closed a connection that it kept open."""
    try:
        return ask(http, path, body, abort)
    except (httpx.NetworkError, httpx.RemoteProtocolError):  # a dead server closes the second one, too
        return ask(http, path, body, abort)


def mismatch(http: httpx.Client, plain: httpx.Client | None, path: str, body: dict[str, Any], abort: bool) -> str:
    """What is wrong with the answer to one body, in a line; empty if nothing is."""
    try:
        found = _asked(http, path, body, abort)
        if found.status == 0:
            return ""
        if found.failed and not leaves_no_token(body):
            return f"{found.status}: {found.said[:200]}: {shown(body)}"
        if plain is None or abort or not is_decided(body):
            return ""
        wanted = _asked(plain, path, body)
    except httpx.TransportError as error:
        return f"{type(error).__name__} {error}: {shown(body)}"
    if wanted.status != found.status:
        rejected = found.status == 400 and any(name in body for name in WITHOUT_DRAFT_ONLY)
        return "" if rejected else f"{found.status} {found.said[:100]}, without a draft {wanted.status}: {shown(body)}"
    differ = found.status == 200 and wanted.choices != found.choices
    return f"{found.choices}, without a draft {wanted.choices}: {shown(body)}" if differ else ""


def fuzz(
    url: str, plain_url: str | None, made: Iterator[dict[str, Any]], seconds: float, path: str = "/v1/completions"
) -> tuple[int, list[str]]:
    """Send bodies, several at a time, until the time is over or something is wrong.

    Args:
        plain_url: the server without a draft, if there is one.

    Returns:
        How many were sent, and what went wrong, a line each.
    """
    until, sent, wrong, draw = time.monotonic() + seconds, 0, [], random.Random(1)
    with contextlib.ExitStack() as stack:
        client = functools.partial(httpx.Client, timeout=300, trust_env=False)
        http = stack.enter_context(client(base_url=url))
        plain = stack.enter_context(client(base_url=plain_url)) if plain_url else None
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        while time.monotonic() < until and not wrong:
            some = list(itertools.islice(made, 8 * WORKERS))
            jobs = [pool.submit(mismatch, http, plain, path, body, draw.random() < ABORTED) for body in some]
            wrong += [said for job in jobs if (said := job.result())]
            sent += len(some)
    return sent, wrong


def shown(body: dict[str, Any]) -> str:
    """A body in a line, long values cut."""
    return ", ".join(f"{name}={json.dumps(value)[:80]}" for name, value in body.items())
