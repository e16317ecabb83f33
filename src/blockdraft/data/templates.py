"""From conversations to token ids with the replies marked, by the verifier's own chat template.

Nothing is looked for in the text. What the template writes before a reply is the conversation rendered up to there with
the opening of a reply (what a server would be given), and the reply is what it writes more when the turn is there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockdraft.data.conversations import Conversation, Messages, RowError, reply_turns, request
from blockdraft.records import Span


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation, or of a part of it.

    Attributes:
        input_ids: the text; the decoder's side where the verifier has an encoder.
        targets: spans of the replies; empty where the replies are still to be written.
        source_ids: what the encoder reads.
        finish: "stop" where the last reply ends its turn, else "length".
    """

    input_ids: list[int]
    targets: tuple[Span, ...]
    source_ids: list[int] | None = None
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a conversation: its texts, how many of its replies the template left out, and of how many others
    it left out the reasoning."""

    texts: list[Encoded]
    hidden: int = 0
    no_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class ChatMode:
    """What a chat template is told besides the turns: whether to think ("on", "off", or "auto", its default), and which
    tools are offered. A draft learns text that was made so, and is served so."""

    thinking: str = "auto"
    tools: tuple[Any, ...] = ()

    def options(self) -> dict[str, Any]:
        """Arguments of the template, by the name that families with thoughts have agreed on."""
        return {} if self.thinking == "auto" else {"enable_thinking": self.thinking == "on"}


@dataclass(frozen=True)
class ChatTemplate:
    """How a verifier's conversations are written.

    Attributes:
        tokenizer: with the verifier's chat template, or without one: then a single question is its own prompt.
        stop_ids: tokens that end a reply.
        start_id: the first token of the decoder where there is an encoder; each reply is then a text of its own.
        mode: what the template is told; its tools are for conversations that name none of their own.
        rewritten_history: what becomes of a conversation whose earlier replies the template changes when later turns
            follow, as templates do that drop thoughts: "last" learns the last reply only, "split" makes a text of each
            reply, "reject" rejects the row.
    """

    tokenizer: Any
    stop_ids: frozenset[int]
    start_id: int | None = None
    mode: ChatMode = ChatMode()
    rewritten_history: str = "last"

    @property
    def has_template(self) -> bool:
        return getattr(self.tokenizer, "chat_template", None) is not None

    @functools.cached_property
    def end_id(self) -> int | None:
        """The token that ends a reply: the one that the template writes behind it, else the tokenizer's own."""
        if self.has_template and self.start_id is None:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            for token in reversed(self._ids(self.render(turns))):
                if token in self.stop_ids:
                    return token
        return self.tokenizer.eos_token_id

    def offered(self, tools: list[Any] | None) -> list[Any] | None:
        """A conversation's own tools, else those of all."""
        return tools or list(self.mode.tools) or None

    def render(self, messages: Messages, tools: list[Any] | None = None, opening: bool = False) -> str:
        """The text of some turns.

        Args:
            opening: end with the opening of a reply.

        Raises:
            RowError: the template rejects them, or there is no template and they are more than one question.
        """
        if not self.has_template:
            if len(messages) != 1:
                raise RowError("no chat template", "single questions only")
            return str(messages[0]["content"])
        turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in messages]
        try:
            return self.tokenizer.apply_chat_template(
                turns, tools=self.offered(tools), add_generation_prompt=opening, tokenize=False, **self.mode.options()
            )
        except Exception as error:  # jinja raises what the template says, or whatever its code stumbles over
            raise RowError("the template refuses it", str(error).splitlines()[0][:120] if str(error) else "") from None

    def prompt_ids(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """What a server is given: token ids up to where the reply starts; for an encoder, all of its source."""
        text = self.render(messages, tools, opening=True)
        return list(self.tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])

    def encode(self, conversations: Sequence[Conversation]) -> list[Result | RowError]:
        """Encode conversations whose replies are there."""
        plans = [self._plan(conversation) for conversation in conversations]
        texts = [part for plan in plans if isinstance(plan, _Plan) for part in plan.parts]
        encoded = iter(self._tokenise(texts))
        results: list[Result | RowError] = []
        for plan in plans:
            if isinstance(plan, RowError):
                results.append(plan)
                continue
            parts = [next(encoded) for _ in plan.parts]
            bad = next((part for part in parts if isinstance(part, RowError)), None)
            texts_of = [part for part in parts if isinstance(part, Encoded)]
            results.append(bad or Result(texts_of, plan.hidden, plan.no_reasoning))
        return results

    def encode_requests(self, conversations: Sequence[Conversation]) -> list[Result | RowError]:
        """What is asked first in each conversation, for replies that are still to be written."""
        results: list[Result | RowError] = []
        for conversation in conversations:
            try:
                ids = self.prompt_ids(request(conversation.messages), conversation.tools)
            except RowError as error:
                results.append(error)
                continue
            if self.start_id is None:
                results.append(Result([Encoded(ids, ())]))
            else:
                results.append(Result([Encoded([self.start_id], (), ids)]))
        return results

    def encode_written(self, conversation: Conversation, replies: Mapping[int, list[int]]) -> list[Encoded]:
        """The texts of a conversation with the very tokens that the verifier wrote.

        Args:
            replies: token ids by turn; the turns' content is their text.

        Raises:
            RowError: as `encode`.
        """
        texts: list[Encoded] = []
        ids: list[int] = []
        spans: list[Span] = []
        turns = [turn for turn in reply_turns(conversation.messages) if turn in replies]
        for turn in turns:
            reply = replies[turn]
            if not reply:
                raise RowError("empty reply")
            finish = "stop" if reply[-1] in self.stop_ids else "length"
            prompt = self.prompt_ids(conversation.messages[:turn], conversation.tools)
            if self.start_id is not None:
                texts.append(Encoded([self.start_id, *reply], ((1, 1 + len(reply)),), prompt, finish))
                continue
            if prompt[: len(ids)] != ids:  # the text so far is not what a server is given before this reply
                if self.rewritten_history == "reject":
                    raise RowError("the template rewrites history")
                if self.rewritten_history == "split":
                    texts.append(Encoded(ids, tuple(spans)))
                spans = []
            ids = prompt + reply
            spans.append((len(prompt), len(ids)))
            if turn == turns[-1]:
                texts.append(Encoded(ids, tuple(spans), None, finish))
        return texts

    def _plan(self, conversation: Conversation) -> _Plan | RowError:
        turns = reply_turns(conversation.messages)
        try:
            if not turns:
                raise RowError("no reply to learn")
            if self.start_id is not None or not self.has_template:
                lost = sum(_has_reasoning(conversation.messages[turn]) for turn in turns)
                return _Plan([self._pair(conversation, turn) for turn in turns], no_reasoning=lost)
            return self._continued(conversation, turns)
        except RowError as error:
            return error

    def _pair(self, conversation: Conversation, turn: int) -> _Text:
        source = self.render(conversation.messages[:turn], conversation.tools, opening=True)
        reply = str(conversation.messages[turn]["content"])
        return _Text(source + reply, ((len(source), len(source) + len(reply)),))

    def _continued(self, conversation: Conversation, turns: list[int]) -> _Plan:
        """One text with every reply in it, where the template leaves earlier turns as they were."""
        messages, tools = conversation.messages, conversation.tools
        whole = self.render(messages[: turns[-1] + 1], tools)
        spans = []
        lost = 0
        for turn in turns:
            prompt = self.render(messages[:turn], tools, opening=True)
            answered = whole if turn == turns[-1] else self.render(messages[: turn + 1], tools)
            if not answered.startswith(prompt):
                raise RowError("the template does not continue its prompt")
            written = answered[len(prompt) :]
            _require_calls(messages[turn], written)
            lost += _has_reasoning(messages[turn]) and messages[turn]["reasoning_content"].strip() not in written
            spans.append((prompt + _no_thought(written, messages[turn]), answered))
        if all(whole.startswith(answered) for _, answered in spans):
            marks = tuple((len(prompt), len(answered)) for prompt, answered in spans)
            return _Plan([_Text(whole, marks)], no_reasoning=lost)
        if self.rewritten_history == "reject":
            raise RowError("the template rewrites history")
        kept = spans if self.rewritten_history == "split" else spans[-1:]
        texts = [_Text(answered, ((len(prompt), len(answered)),)) for prompt, answered in kept]
        return _Plan(texts, len(spans) - len(kept), lost)

    def _tokenise(self, texts: list[_Text]) -> list[Encoded | RowError]:
        if not texts:
            return []
        if not self.has_template or self.start_id is not None:
            return self._tokenise_pairs(texts)
        if not getattr(self.tokenizer, "is_fast", False):
            return [self._tokenise_parts(text) for text in texts]
        rows = self.tokenizer([t.text for t in texts], add_special_tokens=False, return_offsets_mapping=True)
        return [
            self._cut(text, ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2))
            for text, ids, offsets in zip(texts, rows["input_ids"], rows["offset_mapping"], strict=True)
        ]

    def _cut(self, text: _Text, ids: list[int], offsets: np.ndarray) -> Encoded | RowError:
        """Spans of tokens from spans of characters."""
        starts, ends = offsets[:, 0], offsets[:, 1]
        spans = []
        for start, end in text.marks:
            first = int(np.searchsorted(ends, start, side="right"))
            # A token across the boundary is none that the verifier could have written behind this prompt. Tokenizers
            # that leave a leading space out of a token's offsets do not show it.
            if first < len(ids) and (starts[first] < start or text.text[start - 1] == " "):
                return self._tokenise_parts(text)
            spans.append((first, int(np.searchsorted(starts, end, side="left"))))
        return self._closed(ids, spans)

    def _tokenise_parts(self, text: _Text) -> Encoded | RowError:
        """Prompt and reply each on its own, as they are made when a server decodes."""
        ids: list[int] = []
        spans, at = [], 0
        for start, end in text.marks:
            ids += self._ids(text.text[at:start])
            reply = self._ids(text.text[start:end])
            spans.append((len(ids), len(ids) + len(reply)))
            ids += reply
            at = end
        return self._closed(ids, spans)

    def _tokenise_pairs(self, texts: list[_Text]) -> list[Encoded | RowError]:
        """Questions and replies that no template frames; the end-of-text token closes each."""
        starts = [text.marks[0][0] for text in texts]
        asked = [text.text[:start] for text, start in zip(texts, starts, strict=True)]
        answered = [text.text[start:] for text, start in zip(texts, starts, strict=True)]
        prompts = self.tokenizer(asked, add_special_tokens=not self.has_template)["input_ids"]
        replies = self.tokenizer(answered, add_special_tokens=False)["input_ids"]
        return [self._paired(list(prompt), list(reply)) for prompt, reply in zip(prompts, replies, strict=True)]

    def _paired(self, prompt: list[int], reply: list[int]) -> Encoded | RowError:
        if not prompt:
            return RowError("empty source")
        if not reply:
            return RowError("nothing to learn")
        reply.append(self.tokenizer.eos_token_id)
        if self.start_id is not None:
            return Encoded([self.start_id, *reply], ((1, 1 + len(reply)),), prompt)
        return Encoded(prompt + reply, ((len(prompt), len(prompt) + len(reply)),))

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _closed(self, ids: list[int], spans: list[tuple[int, int]]) -> Encoded | RowError:
        """End every reply with the token that ends its turn; the verifier writes nothing behind it."""
        targets, finish = [], "length"
        for start, end in spans:
            stop = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self.stop_ids), None)
            finish = "length" if stop is None else "stop"
            targets.append((start, end if stop is None else stop + 1))
            start, end = targets[-1]
            if end - start < (1 if stop is None else 2):  # nothing, or nothing but its end
                return RowError("nothing to learn", "the template shows nothing of the reply")
        return Encoded(ids[: targets[-1][1]], tuple(targets), None, finish)


_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


def _no_thought(written: str, turn: dict[str, Any]) -> str:
    """The empty block of thoughts that a template puts before a reply without any: nobody wrote it, nor learns it."""
    found = _EMPTY_THOUGHT.match(written)
    return "" if found is None or turn["content"].lstrip().startswith("<think>") else found[0]


def _has_reasoning(turn: dict[str, Any]) -> bool:
    reasoning = turn.get("reasoning_content")
    return isinstance(reasoning, str) and bool(reasoning.strip())


def _require_calls(turn: dict[str, Any], shown: str) -> None:
    """Templates that know no tools leave calls out without a word."""
    for call in turn.get("tool_calls", []):
        name = (call.get("function") or call).get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in shown:
            raise RowError("the template does not show tool calls", str(name)[:60])


@dataclass(frozen=True, slots=True)
class _Text:
    """A rendered text and the characters of its replies."""

    text: str
    marks: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: list[_Text]
    hidden: int = 0
    no_reasoning: int = 0


def truncated(encoded: Encoded, max_source: int, max_length: int) -> tuple[Encoded, int, int]:
    """Cut a text to its limits; returns it with the tokens cut from its source and from itself.

    Raises:
        RowError: nothing to learn is left.
    """
    source = encoded.source_ids
    cut_source = max(0, len(source) - max_source) if source is not None else 0
    cut = max(0, len(encoded.input_ids) - max_length)
    if not cut and not cut_source:
        return encoded, 0, 0
    targets = tuple((a, min(b, max_length)) for a, b in encoded.targets if a < max_length)
    if not targets and encoded.targets:
        raise RowError("no reply within the limit", f"{len(encoded.input_ids)} tokens")
    kept = Encoded(
        encoded.input_ids[:max_length],
        targets,
        None if source is None else source[:max_source],
        "length" if cut else encoded.finish,
    )
    return kept, cut_source, cut
