"""What a verifier is asked: a conversation up to one of its replies, the earlier ones being its own by then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockdraft.data.conversations import Conversation, Messages, reply_turns
from blockdraft.data.journal import Journal
from blockdraft.data.templates import ChatTemplate


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to write.

    Attributes:
        id: of the conversation.
        turn: index of the reply among its turns.
        messages: the turns before it.
        prompt: the same as token ids, as the chat template writes them; of a verifier with an encoder, its source.
    """

    id: str
    turn: int
    messages: Messages
    tools: list[Any] | None
    prompt: list[int]


def with_replies(conversation: Conversation, id: str, journal: Journal, template: ChatTemplate) -> Conversation:
    """A conversation with the replies that are written, as text."""
    messages = [dict(turn) for turn in conversation.messages]
    for turn in reply_turns(messages):
        reply = journal.get(id, turn)
        if reply is not None:
            ids = reply.tokens[:-1] if reply.tokens and reply.tokens[-1] in template.stop_ids else reply.tokens
            messages[turn]["content"] = template.tokenizer.decode(ids)
    return Conversation(messages, conversation.tools)


def next_request(
    conversation: Conversation, id: str, number: int, template: ChatTemplate, max_source: int
) -> Request | None:
    """The request for a conversation's reply of this number (0 the first); None when it has fewer.

    Args:
        conversation: with its earlier replies written.
        max_source: where an encoder's source is cut: what is answered is what will be supervised with the answer.

    Raises:
        RowError: the template rejects it.
    """
    turns = reply_turns(conversation.messages)
    if number >= len(turns):
        return None
    before = conversation.messages[: turns[number]]
    prompt = template.prompt_ids(before, conversation.tools)
    if template.start_id is not None:
        prompt = prompt[:max_source]
    return Request(id, turns[number], before, conversation.tools, prompt)
