"""A client of a running vLLM server: completions by token ids, streamed text, and the engine's counters."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from blockdraft.errors import BlockdraftError, InputError

if TYPE_CHECKING:  # importing it takes a second, which commands that ask no server need not wait
    from openai import OpenAI

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",  # tokens
}
# Stated in every request: vLLM takes what is left out from the verifier's generation_config.json, which may punish
# repetitions or keep the 20 most likely tokens only.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # of these, what any server knows
TIMEOUT_SECONDS = 600.0  # for one request: a long reply on a CPU
KEY = "OPENAI_API_KEY"


def connect(url: str, timeout: float) -> OpenAI:
    """A client of the server at an address that tries once; proxies are for other machines."""
    from openai import OpenAI

    http = httpx.Client(trust_env=False)
    return OpenAI(base_url=f"{url}/v1", api_key=api_key(), timeout=timeout, max_retries=0, http_client=http)


def api_key() -> str:
    """The key that is sent along; servers without keys take any."""
    return os.environ.get(KEY) or "none"


def line_of(error: Exception) -> str:
    """What went wrong, in a line: for a lost connection, how it was lost."""
    cause = error.__cause__ or error
    return (str(cause).splitlines() or [type(cause).__name__])[0][:200]


def served_model(client: OpenAI, kind: str, endpoint: str, wanted: str | None) -> dict[str, Any]:
    """A model that a server serves: its `id`, `owned_by` and `max_model_len` (None where the server does not say).

    Args:
        wanted: its name there; None: the only one.

    Raises:
        InputError: nobody answers there, or nobody who speaks the interface of a server of this kind; or it serves no
            such model, or several and none is named.
    """
    from openai import OpenAIError

    try:
        entries = client.models.with_raw_response.list().http_response.json()["data"]
        models = {str(entry["id"]): entry for entry in entries}
        named = {name: (entry.get("owned_by"), entry.get("max_model_len")) for name, entry in models.items()}
        if not models:
            raise ValueError("it serves no model")
    except (OpenAIError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError("--endpoint", endpoint, f"no {kind} server answers there ({line_of(error)})") from None
    if wanted is None and len(models) > 1:
        raise InputError("--model", "missing", f"{endpoint} serves several; name one of {', '.join(models)}")
    if wanted is not None and wanted not in models:
        raise InputError("--model", wanted, f"{endpoint} serves {', '.join(models)}")
    model = wanted if wanted is not None else next(iter(models))
    owner, longest = named[model]
    return {"id": model, "owned_by": owner, "max_model_len": longest}


@dataclass(frozen=True, slots=True)
class Served:
    """A reply of the engine.

    Attributes:
        request: the engine's request id.
        tokens: token ids of the reply, the end-of-turn id included if it came.
        accepted: proposed tokens that the verifier accepted, round by round, also those behind the reply's end.
    """

    request: str
    tokens: list[int]
    accepted: list[int]


class EngineClient:
    """Speaks the OpenAI-compatible interface of one server.

    Args:
        url: such as http://127.0.0.1:8000.
        model: its name there; None: the only one that it serves.

    Raises:
        InputError: nobody answers there, or not with this model.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = connect(self.url, TIMEOUT_SECONDS)
        found = served_model(self._client, "vLLM", url, model)
        self.model: str = found["id"]
        self.max_model_len: int | None = found["max_model_len"]

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def complete(self, prompt: list[int], stop_ids: list[int], **sampling: Any) -> Served:
        """Decode one prompt of token ids.

        Args:
            sampling: max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos; what is left out is neutral,
                whatever the verifier's generation_config.json says.
        """
        answer = self._completion(prompt, stop_ids, sampling)
        choice = answer["choices"][0]
        return Served(
            answer["id"], list(choice["token_ids"]), list(_speculation(answer).get("per_step_accepted") or [])
        )

    def stream(self, prompt: list[int], stop_ids: list[int], **sampling: Any) -> Iterator[list[int]]:
        """Token ids of one reply, as many at a time as the server sends."""
        fields = _fields(stop_ids, sampling)
        with self._one_line(), self._client.completions.create(
            model=self.model, prompt=prompt, stream=True, extra_body=fields
        ) as answer:  # fmt: skip
            for event in answer:
                for choice in event.choices:
                    if tokens := (choice.model_extra or {}).get("token_ids"):
                        yield list(tokens)

    def num_speculative_tokens(self, prompt: list[int]) -> int | None:
        """Tokens that the server proposes a round; None: it has no draft, or does not say.

        Args:
            prompt: any that it reads.
        """
        answer = self._completion(prompt, [], {"max_tokens": 2, "temperature": 0, "ignore_eos": True})
        return _speculation(answer).get("num_spec_tokens")

    def counters(self) -> dict[str, int]:
        """The engine's own counts of drafts, proposed and accepted tokens since it started; 0 without a draft."""
        from prometheus_client.parser import text_string_to_metric_families

        totals: Counter[str] = Counter()
        with self._one_line():
            text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_SECONDS, trust_env=False).raise_for_status().text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    totals[sample.name] += int(sample.value)
        return {name: totals[metric] for name, metric in COUNTERS.items()}

    def _completion(self, prompt: list[int], stop_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """The answer as it came: openai's types do not have vLLM's fields."""
        create = self._client.completions.with_raw_response.create
        with self._one_line():
            answer = create(model=self.model, prompt=prompt, extra_body=_fields(stop_ids, sampling))
            return dict(answer.http_response.json())

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        from openai import APIError, APIStatusError

        try:
            yield
        except APIStatusError as error:
            said = f"({error.status_code}): {error.response.text[:300]}"
            raise BlockdraftError(f"the server at {self.url} refused {said}") from None
        except (APIError, httpx.HTTPError, ValueError) as error:
            raise BlockdraftError(f"the server at {self.url} stopped: {line_of(error)}") from None


def _speculation(answer: dict[str, Any]) -> dict[str, Any]:
    return (answer.get("metrics") or {}).get("speculative_decoding") or {}


def _fields(stop_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {**NEUTRAL, "return_token_ids": True, "stop_token_ids": stop_ids, **sampling}


def wait_until_ready(url: str, alive: Any, seconds: float) -> None:
    """Wait until a server is healthy.

    Args:
        alive: called between tries; False ends the waiting.

    Raises:
        BlockdraftError: it ended, or took longer than `seconds`.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not alive():
            raise BlockdraftError(f"the server for {url} ended before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    raise BlockdraftError(f"the server at {url} was not ready after {seconds:.0f} s")
