"""A client of a running vLLM server: completions by token ids, streamed text, and the engine's counters."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2 as httpx

from blockdraft.errors import BlockdraftError, InputError

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
TIMEOUT_SECONDS = 600.0  # for one request: a long reply on a processor


def served_model(http: httpx.Client, kind: str, endpoint: str, wanted: str | None) -> dict[str, Any]:
    """A model that a server serves: its `id`, `owned_by` and `max_model_len` (None where the server does not say).

    Args:
        wanted: its name there; None: the only one.

    Raises:
        InputError: nobody answers there, or nobody who speaks the interface of a server of this kind; or it serves no
            such model, or several and none is named.
    """
    try:
        entries = http.get("/v1/models").raise_for_status().json()["data"]
        models = {str(entry["id"]): entry for entry in entries}
        named = {name: (entry.get("owned_by"), entry.get("max_model_len")) for name, entry in models.items()}
        if not models:
            raise ValueError("it serves no model")
    except (httpx.HTTPError, KeyError, TypeError, ValueError, AttributeError) as error:
        line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError("--endpoint", endpoint, f"no {kind} server answers there ({line})") from None
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
        agreed: drafted tokens that the verifier agreed with, round by round, also those behind the reply's end.
    """

    request: str
    tokens: list[int]
    agreed: list[int]


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
        self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS, trust_env=False)
        found = served_model(self._http, "vLLM", url, model)
        self.model: str = found["id"]
        self.max_model_len: int | None = found["max_model_len"]

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def complete(self, prompt: list[int], stop_ids: list[int], **sampling: Any) -> Served:
        """Decode one prompt of token ids.

        Args:
            sampling: max_tokens, temperature, top_p, top_k, seed, stop, ignore_eos; what is left out is neutral,
                whatever the verifier's generation_config.json says.
        """
        answer = self._post(_body(prompt, stop_ids, sampling)).json()
        choice = answer["choices"][0]
        measured = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return Served(answer["id"], list(choice["token_ids"]), list(measured.get("per_step_accepted") or []))

    def stream(self, prompt: list[int], stop_ids: list[int], **sampling: Any) -> Iterator[list[int]]:
        """Token ids of one reply, as many at a time as the server sends."""
        body = {"model": self.model, "stream": True, **_body(prompt, stop_ids, sampling)}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                answer.read()
                raise self._failure(answer)
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise BlockdraftError(f"the server at {self.url} stopped: {event['error'].get('message')}")
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        yield list(choice["token_ids"])

    def num_speculative_tokens(self, prompt: list[int]) -> int | None:
        """Tokens that the server proposes a round; None: it has no draft, or does not say.

        Args:
            prompt: any that it reads.
        """
        answer = self._post(_body(prompt, [], {"max_tokens": 2, "temperature": 0, "ignore_eos": True})).json()
        measured = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return measured.get("num_spec_tokens")

    def counters(self) -> dict[str, int]:
        """The engine's own counts of drafts, proposed and accepted tokens since it started; 0 without a draft."""
        text = self._http.get("/metrics").raise_for_status().text
        return {
            name: int(sum(float(value) for value in re.findall(rf"^{re.escape(metric)}(?:{{.*}})? (\S+)$", text, re.M)))
            for name, metric in COUNTERS.items()
        }

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        answer = self._http.post("/v1/completions", json={"model": self.model, **body})
        if answer.is_error:
            raise self._failure(answer)
        return answer

    def _failure(self, answer: httpx.Response) -> BlockdraftError:
        return BlockdraftError(f"the server at {self.url} refused ({answer.status_code}): {answer.text[:300]}")


def _body(prompt: list[int], stop_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {**NEUTRAL, "prompt": prompt, "return_token_ids": True, "stop_token_ids": stop_ids, **sampling}


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
