"""A draft under load: K by the number of requests at once, and a test of where a draft stops paying.

The more requests an engine decodes together, the less of the machine is idle, and the more each proposed token costs.
vLLM 0.32 can choose K by that number (`num_speculative_tokens_per_batch_size` of its speculative config).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.serving.client import EngineClient

REQUESTS_AT_ONCE = (1, 2, 4, 8)
TOKENS = 32  # a reply of the self-test
FLAG = "--k-by-load"

Steps = list[tuple[int, int]]
"""K for up to so many requests at once; the last one also for more."""


def read_steps(given: Sequence[str], contract: Contract) -> Steps:
    """Steps from the command line, such as 2:7 4:3 8:0.

    Raises:
        InputError: not pairs of numbers that rise, or a K that the draft was not trained for.
    """
    steps: Steps = []
    for text in given:
        try:
            most, k = (int(part) for part in text.split(":"))
        except ValueError:
            raise InputError(FLAG, text, "give pairs UP_TO:K, such as 2:7 4:3 8:0") from None
        if most <= (steps[-1][0] if steps else 0):
            raise InputError(FLAG, text, "numbers of requests must be above 0 and rise")
        if k:
            contract.require_k(k, FLAG)
        steps.append((most, k))
    if steps and not any(k for _, k in steps):
        raise InputError(FLAG, " ".join(given), "never proposes anything; serve without the draft instead")
    return steps


def engine_ranges(steps: Steps) -> list[list[int]]:
    """The same as the engine wants it: first and last number of requests, K."""
    starts = [1, *(most + 1 for most, _ in steps)]
    return [[start, most, k] for start, (most, k) in zip(starts, steps, strict=False)]


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second with so many requests at once."""

    requests: int
    tokens_per_second: float


def measure(url: str, prompts: Sequence[list[int]], at_once: Sequence[int] = REQUESTS_AT_ONCE) -> list[Rate]:
    """How fast a server answers prompts greedily, by the number of requests at once; each is warmed up before."""
    rates = []
    for count in at_once:
        asked = list(itertools.islice(itertools.cycle(prompts), max(4, count)))
        with EngineClient(url) as client, ThreadPoolExecutor(count) as pool:

            def tokens(prompt: list[int], limit: int, client: EngineClient = client) -> int:
                return len(client.complete(prompt, [], max_tokens=limit, temperature=0, ignore_eos=True).tokens)

            list(pool.map(lambda prompt: tokens(prompt, TOKENS), asked[:count]))
            start = time.perf_counter()
            total = sum(pool.map(lambda prompt: tokens(prompt, TOKENS), asked))
            rates.append(Rate(count, total / (time.perf_counter() - start)))
    return rates


def report(plain: Sequence[Rate], drafted: Sequence[Rate], k: int) -> list[str]:
    """Lines that say what the draft gains, and from how many requests at once it costs."""
    lines, paying, ended = [], 0, False
    for a, b in zip(plain, drafted, strict=True):
        ratio = b.tokens_per_second / a.tokens_per_second
        lines.append(
            f"self-test, requests at once {a.requests}: {a.tokens_per_second:.1f} tokens/s without the draft, "
            f"{b.tokens_per_second:.1f} with it ({ratio:.2f})"
        )
        ended = ended or ratio <= 1
        paying = paying if ended else a.requests
    if not ended:
        verdict = f"the draft pays with up to {paying} requests at once, as far as was tried"
    elif paying:
        verdict = f"the draft pays with up to {paying} requests at once; serve with {FLAG} {paying}:{k} {paying + 1}:0"
    else:
        verdict = "the draft slows this machine down on these prompts; try a smaller --k, or serve without it"
    return [*lines, f"self-test: {verdict}"]
