"""The verifier's own replies through any OpenAI-compatible server: many requests at a time, retried, kept one by one.

A vLLM server is asked for token ids, and for those of the prompt: if they are not what the verifier's chat template
writes, the server serves something else and the run stops. Of other servers the text is taken and encoded anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import openai

from blockdraft.data.journal import Journal, Written
from blockdraft.data.requests import Request
from blockdraft.data.templates import ChatTemplate
from blockdraft.errors import BlockdraftError
from blockdraft.progress import Advance, progress
from blockdraft.serving.client import KEY, NEUTRAL, OPENAI, api_key, connect, line_of, served_model
from blockdraft.settings import RegenerateSettings

_AGAIN = frozenset({408, 409, 425, 429})  # refusals that may pass; and every 5xx
_NOT_OURS = frozenset({401, 403, 404})  # refusals that no request will escape


class _RefusedError(Exception):
    """The server will not answer this request, now or later."""


@dataclass(frozen=True, slots=True)
class Server:
    """Who answers at an address.

    Attributes:
        model: its name there.
        gives_ids: whether it is vLLM and gives token ids.
    """

    url: str
    model: str
    gives_ids: bool


def find_server(endpoint: str, model: str | None) -> Server:
    """Ask who answers.

    Args:
        model: which of its models is the verifier; None: the only one.

    Raises:
        InputError: nobody, or nobody who speaks the interface or serves this model.
    """
    url = endpoint.rstrip("/").removesuffix("/v1")
    with connect(url, 30) as client:
        found = served_model(client, "OpenAI-compatible", endpoint, model)
    return Server(url, found["id"], found["owned_by"] == "vllm")


def write_replies(
    server: Server, requests: Sequence[Request], template: ChatTemplate, settings: RegenerateSettings, journal: Journal
) -> None:
    """Ask for what the journal does not have yet, and put it there.

    Raises:
        BlockdraftError: a request failed after all its tries; what came before is in the journal.
    """
    missing = [request for request in requests if journal.get(request.id, request.turn) is None]
    with progress("replies", len(requests), len(requests) - len(missing)) as advance:
        asyncio.run(_Asking(server, template, settings, journal, advance).all(missing))


class _WholeAnswers(httpx.AsyncClient):
    """Whatever is not a completion, whole and in time, is an error of the connection, which is tried again."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(self.timeout.read):
                answer = await super().send(request, **options)
            if answer.is_success:
                answer.json()["choices"][0]
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer in {self.timeout.read:g} s", request=request) from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise httpx.DecodingError("not a completion", request=request) from None
        return answer


class _Asking:
    def __init__(
        self, server: Server, template: ChatTemplate, settings: RegenerateSettings, journal: Journal, advance: Advance
    ) -> None:
        self.server, self.template, self.settings, self.journal = server, template, settings, journal
        self.advance = advance
        self.failure: BlockdraftError | None = None

    async def all(self, requests: Sequence[Request]) -> None:
        """Workers take requests in order; after a failure none is begun, and those under way are finished."""
        waiting, seconds = iter(requests), self.settings.request_timeout
        limits = httpx.Limits(max_connections=self.settings.concurrency)
        http = _WholeAnswers(timeout=seconds, limits=limits, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key=api_key(), timeout=seconds, max_retries=self.settings.max_retries,
            http_client=http,
        ) as client:  # fmt: skip

            async def work() -> None:
                for request in waiting:
                    if self.failure is not None:
                        return
                    await self._one(client, request)

            await asyncio.gather(*(work() for _ in range(min(self.settings.concurrency, len(requests)))))
        if self.failure is not None:
            raise self.failure

    async def _one(self, client: openai.AsyncOpenAI, request: Request) -> None:
        try:
            reply = self._reply(request, await self._asked(client, request))
        except _RefusedError as error:
            reply = Written(request.id, request.turn, [], str(error))
        except BlockdraftError as error:
            self.failure = error
            return
        except (openai.OpenAIError, ValueError, KeyError, TypeError) as error:
            self.failure = BlockdraftError(
                f"{self.server.url}: {request.id} got no reply after {self.settings.max_retries + 1} tries "
                f"({line_of(error)}); {len(self.journal)} replies are kept, the same command goes on from there"
            )
            return
        self.journal.add([reply])
        self.advance()

    async def _asked(self, client: openai.AsyncOpenAI, request: Request) -> dict[str, Any]:
        """The answer as it came, since openai's types do not have vLLM's fields."""
        model, fields = self.server.model, self._fields(request)
        try:
            # A source may have been cut, which messages cannot say.
            if not self.template.has_template or (self.template.start_id is not None and self.server.gives_ids):
                prompt: Any = request.prompt if self.server.gives_ids else self.template.render(request.messages)
                completions = client.completions.with_raw_response
                return (await completions.create(model=model, prompt=prompt, extra_body=fields)).http_response.json()
            turns: Any = [{key: value for key, value in turn.items() if key != "weight"} for turn in request.messages]
            if tools := self.template.offered(request.tools):
                fields["tools"] = tools
            if options := self.template.mode.options():
                fields["chat_template_kwargs"] = options
            chats = client.chat.completions.with_raw_response
            return (await chats.create(model=model, messages=turns, extra_body=fields)).http_response.json()
        except openai.APIStatusError as error:
            status, text = error.status_code, error.response.text[:200]
            if status in _NOT_OURS:
                raise BlockdraftError(
                    f"{self.server.url} refuses every request ({status}: {text}); an API key is read from {KEY}"
                ) from None
            if 400 <= status < 500 and status not in _AGAIN:
                raise _RefusedError(f"{status}: {text}") from None
            raise

    def _fields(self, request: Request) -> dict[str, Any]:
        settings = self.settings
        # A request's own seed makes its sample the same in whatever order requests are answered.
        mark = hashlib.sha256(f"{settings.seed}/{request.id}/{request.turn}".encode()).digest()
        known = NEUTRAL if self.server.gives_ids else {name: NEUTRAL[name] for name in OPENAI}
        fields: dict[str, Any] = {
            **known,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": int.from_bytes(mark[:4], "big") >> 1,
        }
        if self.server.gives_ids:
            fields |= {"return_token_ids": True, "stop_token_ids": sorted(self.template.stop_ids)}
            fields |= {"top_k": settings.top_k}
        return fields

    def _reply(self, request: Request, answer: dict[str, Any]) -> Written:
        choice = answer["choices"][0]
        if self.server.gives_ids:
            asked = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if self.template.start_id is None and asked and asked != request.prompt:
                raise self._other_prompt(request, asked)
            return Written(request.id, request.turn, list(choice["token_ids"]))
        message = choice.get("message") or {}
        if message.get("reasoning_content") or message.get("reasoning"):
            raise _RefusedError("the server took the reasoning out of the reply; start it without a reasoning parser")
        text = choice.get("text") or message.get("content") or ""
        tokens = list(self.template.tokenizer(text, add_special_tokens=False)["input_ids"])
        if choice.get("finish_reason") != "length":
            tokens.append(self.template.end_id)
        return Written(request.id, request.turn, tokens)

    def _other_prompt(self, request: Request, asked: list[int]) -> BlockdraftError:
        at = next((i for i, (a, b) in enumerate(zip(asked, request.prompt, strict=False)) if a != b), None)
        where = f"token {min(len(asked), len(request.prompt)) if at is None else at}"
        return BlockdraftError(
            f"{self.server.url} does not write the verifier's prompt ({request.id}, {where}): it serves another model "
            "or chat template; start it with blockdraft serve or vllm serve on the same folder"
        )
