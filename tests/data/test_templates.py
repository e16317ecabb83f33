"""Masks by rendering prefixes: what is supervised is what the verifier would write behind its prompt, and all of it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockdraft.data.conversations import Conversation, RowError
from blockdraft.data.templates import ChatMode, ChatTemplate, Encoded, Result, truncated

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As the Qwen3 family writes: thoughts of earlier turns are dropped, and without thinking an empty thought is opened.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] and not loop.last %}"
    "{{ m['content'].split('</think>')[1] | trim }}"
    "{% elif m['role'] == 'assistant' and loop.last and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{{ m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m['role'] }}] {{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<pad>"]


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, a few merges across spaces and lines, and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "Ġ"), ("Ċ", "a")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:1]})
    tokenizer.chat_template = template
    return tokenizer


def template_of(template: str | None, **options: object) -> ChatTemplate:
    tokenizer = byte_tokenizer(template)
    mode = ChatMode(**{name: options.pop(name) for name in ("thinking", "tools") if name in options})  # type: ignore
    return ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id}), mode=mode, **options)  # type: ignore[arg-type]


def conversation(*contents: str, **more: object) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": text, **more} for i, text in enumerate(contents)])


def texts(template: ChatTemplate, encoded: Encoded) -> list[str]:
    return [template.tokenizer.decode(encoded.input_ids[a:b]) for a, b in encoded.targets]


def encoded(template: ChatTemplate, *conversations: Conversation) -> list[Result]:
    results = template.encode(conversations)
    assert all(isinstance(result, Result) for result in results), results
    return results  # type: ignore[return-value]


def test_every_reply_and_nothing_else_is_learned() -> None:
    template = template_of(CHATML)
    (result,) = encoded(template, conversation("hi", "hello there", "and?", "日本語 ok"))
    (text,) = result.texts
    assert texts(template, text) == ["hello there<|im_end|>", "日本語 ok<|im_end|>"]
    whole = template.tokenizer.decode(text.input_ids)
    assert whole.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello") and whole.endswith(
        "<|im_end|>"
    )
    assert text.finish == "stop" and result.hidden == 0


def test_the_text_is_what_a_server_is_given_and_then_writes() -> None:
    template = template_of(CHATML)
    talk = conversation("hi", "hello", "and?", "the end")
    ((text,), ) = [result.texts for result in encoded(template, talk)]  # fmt: skip
    for turn, (start, _) in zip((1, 3), text.targets, strict=True):
        assert template.prompt_ids(talk.messages[:turn]) == text.input_ids[:start]


@pytest.mark.parametrize("reply", ["\nafter a line", "a word", " a word", "  two spaces"])
@pytest.mark.parametrize("framing", ["[u] {q}\n", "[u] {q} ", "[u] {q}: "])
def test_no_token_lies_across_the_start_of_a_reply(framing: str, reply: str) -> None:
    """A merge of the prompt's last and the reply's first character exists; a server's prompt cannot contain it."""
    written = framing.replace("{q}", "{{ messages[0]['content'] }}")
    template = template_of(
        written + "{% if messages | length > 1 %}{{ messages[1]['content'] }}<|im_end|>{% endif %}"
    )  # fmt: skip
    (result,) = encoded(template, conversation("q", reply))
    ((start, _),) = result.texts[0].targets
    assert result.texts[0].input_ids[:start] == template.prompt_ids([{"role": "user", "content": "q"}])
    assert texts(template, result.texts[0]) == [reply + "<|im_end|>"]


def test_a_conversation_encodes_alike_alone_and_in_a_batch() -> None:
    template = template_of(CHATML)
    talks = [conversation("q" * n, "the a " * n) for n in (1, 5, 2, 9)]
    assert template.encode(talks) == [template.encode([talk])[0] for talk in talks]


def test_thoughts_are_learned_and_hidden_history_is_counted() -> None:
    talk = conversation("2+2?", "<think>easy</think>4", "3+3?", "<think>hm</think>6")
    last = template_of(THINKING)
    (result,) = encoded(last, talk)
    assert [texts(last, text) for text in result.texts] == [["<think>hm</think>6<|im_end|>"]]
    assert result.hidden == 1
    split = template_of(THINKING, rewritten_history="split")
    (result,) = encoded(split, talk)
    assert [texts(split, text) for text in result.texts] == [
        ["<think>easy</think>4<|im_end|>"], ["<think>hm</think>6<|im_end|>"]
    ]  # fmt: skip
    for number, text in enumerate(result.texts):
        assert split.prompt_ids(talk.messages[: 2 * number + 1]) == text.input_ids[: text.targets[0][0]]
    (refused,) = template_of(THINKING, rewritten_history="reject").encode([talk])
    assert isinstance(refused, RowError) and refused.reason == "the template rewrites history"


def test_without_thinking_the_empty_thought_belongs_to_the_prompt() -> None:
    template = template_of(THINKING, thinking="off")
    (result,) = encoded(template, conversation("2+2?", "4"))
    assert texts(template, result.texts[0]) == ["4<|im_end|>"]
    assert "<think>\n\n</think>" in template.tokenizer.decode(result.texts[0].input_ids)
    thinking = template_of(THINKING, thinking="on")
    assert "<think>" not in thinking.tokenizer.decode(
        encoded(thinking, conversation("2+2?", "4"))[0].texts[0].input_ids
    )


def test_tools_reach_the_template() -> None:
    with_tools = "{% if tools %}tools: {{ tools[0]['name'] }}\n{% endif %}" + CHATML
    template = template_of(with_tools)
    talk = Conversation(conversation("q", "a").messages, [{"name": "lookup"}])
    assert "tools: lookup" in template.tokenizer.decode(encoded(template, talk)[0].texts[0].input_ids)
    for_all = template_of(with_tools, tools=({"name": "search"},))
    for each, name in ((talk, "lookup"), (conversation("q", "a"), "search")):
        assert f"tools: {name}" in for_all.tokenizer.decode(encoded(for_all, each)[0].texts[0].input_ids)


def test_what_a_template_cannot_write_is_refused_and_the_others_stay() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lookup"}}]}
    talks = [
        conversation("q", "a"),
        Conversation([{"role": "user", "content": "q"}, call, {"role": "assistant", "content": "a"}]),
        conversation("q"),
        conversation("q", "a", weight=0),
        conversation("q", "b"),
    ]
    reasons = [r.reason if isinstance(r, RowError) else "" for r in template_of(CHATML).encode(talks)]
    assert reasons == ["", "the template does not show tool calls", "no reply to learn", "no reply to learn", ""]
    twice = Conversation([{"role": "user", "content": "q"}] * 2 + [{"role": "assistant", "content": "a"}])
    (refused,) = template_of(STRICT).encode([twice])
    assert isinstance(refused, RowError) and "roles must alternate" in str(refused)
    (hollow,) = template_of("nothing of the messages").encode([talks[0]])
    assert isinstance(hollow, RowError)


def test_examples_in_the_prompt_are_not_learned() -> None:
    template = template_of(CHATML)
    turns = conversation("example", "shown", "q", "a").messages
    turns[1]["weight"] = 0
    (result,) = encoded(template, Conversation(turns))
    assert texts(template, result.texts[0]) == ["a<|im_end|>"]


def test_pairs_for_an_encoder() -> None:
    """Every turn of the assistant is a pair of its own, with all that went before as its source."""
    plain = template_of(None, start_id=7)
    (result,) = encoded(plain, conversation("source text", "target"))
    (pair,) = result.texts
    assert plain.tokenizer.decode(pair.source_ids) == "source text"
    assert pair.input_ids[0] == 7 and pair.targets == ((1, len(pair.input_ids)),)
    assert texts(plain, pair) == ["target<|im_end|>"]
    (refused,) = plain.encode([conversation("a", "b", "c", "d")])
    assert isinstance(refused, RowError) and refused.reason == "no chat template"
    chat = template_of(CHATML, start_id=7)
    (result,) = encoded(chat, conversation("a", "b", "c", "d"))
    assert [texts(chat, text) for text in result.texts] == [["b<|im_end|>"], ["d<|im_end|>"]]
    assert chat.tokenizer.decode(result.texts[1].source_ids).endswith("c<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_a_reply_is_closed_by_the_end_token() -> None:
    plain = template_of(None)
    (result,) = encoded(plain, conversation("q", "the a"))
    assert texts(plain, result.texts[0]) == ["the a<|im_end|>"]


@pytest.mark.parametrize("rewritten", ["last", "split"])
def test_written_replies_keep_their_own_tokens(rewritten: str) -> None:
    template = template_of(CHATML, rewritten_history=rewritten)
    end = template.tokenizer.eos_token_id
    letters = [template.tokenizer.convert_tokens_to_ids(letter) for letter in "the"]  # not how "the" is encoded
    talk = conversation("q", "the", "q2", "the")
    written = template.encode_written(talk, {1: [*letters, end], 3: [*letters, end]})
    if rewritten == "last":
        (text,) = (
            written  # the first reply comes back as another token in the second prompt: only the last is supervised
        )
        assert [text.input_ids[a:b] for a, b in text.targets] == [[*letters, end]]
    else:
        assert [[t.input_ids[a:b] for a, b in t.targets] for t in written] == [[[*letters, end]]] * 2
    canonical = template.encode_written(talk, {1: [*template._ids("the"), end], 3: [*letters, end]})
    (text,) = canonical
    assert len(text.targets) == 2
    for turn, (start, _) in zip((1, 3), text.targets, strict=True):
        assert template.prompt_ids(talk.messages[:turn]) == text.input_ids[:start]
    (cut,) = template.encode_written(conversation("q", "the"), {1: letters})
    assert cut.finish == "length"


def test_truncation_is_exact() -> None:
    text = Encoded(list(range(20)), ((4, 8), (10, 20)), [1, 2, 3], "stop")
    assert truncated(text, 3, 20) == (text, 0, 0)
    assert truncated(text, 2, 15) == (Encoded(list(range(15)), ((4, 8), (10, 15)), [1, 2], "length"), 1, 5)
    assert truncated(text, 9, 9)[0].targets == ((4, 8),)
    with pytest.raises(RowError, match="no reply within the limit"):
        truncated(text, 9, 4)


QWEN3 = (  # an empty block of thoughts stands before the last reply, where it has none of its own
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n{{ m.get('reasoning_content', '') }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


def test_an_empty_thought_is_not_learned_and_a_real_one_is() -> None:
    template = template_of(QWEN3)
    thought = conversation("hi", "hello")
    thought.messages[1]["reasoning_content"] = "a greeting"
    plain, thinking = encoded(template, conversation("hi", "hello"), thought)
    assert texts(template, plain.texts[0]) == ["hello<|im_end|>"]
    assert texts(template, thinking.texts[0]) == ["<think>\na greeting\n</think>\n\nhello<|im_end|>"]


def test_reasoning_that_the_template_leaves_out_is_counted() -> None:
    thought = conversation("hi", "hello")
    thought.messages[1]["reasoning_content"] = "a greeting"
    (dropped,) = encoded(template_of(CHATML), thought)
    (kept,) = encoded(template_of(QWEN3), thought)
    assert (dropped.no_reasoning, kept.no_reasoning) == (1, 0)


def test_a_reply_ends_with_the_token_of_its_turn() -> None:
    """As in Gemma, whose tokenizer names another token than the one that its template writes behind a reply."""
    tokenizer = byte_tokenizer(CHATML)
    turn_end = tokenizer.eos_token_id
    tokenizer.eos_token = "<pad>"
    assert ChatTemplate(tokenizer, frozenset({turn_end, tokenizer.eos_token_id})).end_id == turn_end
    tokenizer.chat_template = None
    assert ChatTemplate(tokenizer, frozenset({turn_end})).end_id == tokenizer.eos_token_id
