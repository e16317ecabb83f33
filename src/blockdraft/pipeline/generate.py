"""`blockdraft generate`: decode prompts with a draft, in the reference engine or on a running vLLM server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from blockdraft.checkpoints.store import read_contract
from blockdraft.data.conversations import Messages
from blockdraft.data.prompts import encode_prompt, read_prompts
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.errors import InputError
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline.loading import chat_mode_of, encode_all, load_pair, require_confidence, verifier_for
from blockdraft.pipeline.serve import servable_verifier
from blockdraft.serving.client import EngineClient
from blockdraft.settings import GenerateSettings
from blockdraft.verifiers.text_side import read_text_side

Show = Callable[[Any, Reply], None]
"""Called with the tokenizer and a reply that has grown."""


def generate(settings: GenerateSettings, show: Show | None = None) -> dict[str, Any]:
    """Decode; `show` is called with a reply after each of its rounds."""
    conversations = conversations_of(settings)
    return (_on_server if settings.engine == "vllm" else _in_process)(settings, conversations, show)


def conversations_of(settings: GenerateSettings) -> list[Messages]:
    """The prompts to decode: those on the command line, of a file, or the held-out ones of a workload.

    Raises:
        InputError: none or several of these were given, or a prompt is empty.
    """
    given = {"PROMPTS": settings.prompt, "--data-path": settings.data_path, "--workload": settings.workload}
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        several = f"{', '.join(named)}: all given" if named else "none given"
        raise InputError("prompts", several, f"pass one of {', '.join(given)}")
    for number, prompt in enumerate(settings.prompt, start=1):
        if not prompt.strip():
            raise InputError(f"prompt {number}", "empty", "a prompt needs some text")
    if settings.prompt:
        conversations: list[Messages] = [[{"role": "user", "content": prompt}] for prompt in settings.prompt]
    elif settings.data_path:
        conversations = read_prompts(settings.data_path, "--data-path")
    else:
        conversations = workload_prompts(settings.workload or "")[1]
    return conversations[: settings.max_prompts or None]


def _in_process(settings: GenerateSettings, conversations: list[Messages], show: Show | None) -> dict[str, Any]:
    pair = load_pair(settings)
    k = pair.contract.draft.num_speculative_tokens if settings.k is None else settings.k
    if k:
        pair.contract.require_k(k)
    require_confidence(pair, settings.confidence_threshold)
    prompts = encode_all(pair.verifier, conversations, pair.mode)
    engine = DecodingEngine(pair.verifier, pair.draft, k, settings, settings.confidence_threshold)
    tokenizer = pair.verifier.tokenizer
    start = time.perf_counter()
    replies = engine.generate(prompts, settings.batch_size, (lambda reply: show(tokenizer, reply)) if show else None)
    seconds = time.perf_counter() - start
    counts = AcceptanceCounts.of([r for reply in replies for r in reply.rounds], k)
    result = _result(replies, tokenizer, seconds)
    for reply, shown in zip(replies, result["replies"], strict=True):
        shown["rounds"] = len(reply.rounds)
    return {**result, "k": k, "acceptance_length": counts.acceptance_length}


def _on_server(settings: GenerateSettings, conversations: list[Messages], show: Show | None) -> dict[str, Any]:
    """One prompt after the other on a running server; the verifier's weights are not loaded here.

    Acceptance is from the server's counters, so other traffic would be counted in.
    """
    unknown = {"--k": settings.k, "--show-drafts": settings.show_drafts or None,
               "--confidence-threshold": settings.confidence_threshold or None}  # fmt: skip
    for flag, value in unknown.items():
        if value is not None:
            raise InputError(flag, value, "the running server decides; leave it out with --engine vllm")
    contract = read_contract(settings.checkpoint)
    name = servable_verifier(contract, settings.verifier_name_or_path)
    _, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    text_side = read_text_side(name, settings.trust_remote_code, revision)
    tokenizer = text_side.tokenizer
    mode = chat_mode_of(settings.checkpoint, settings.thinking)
    prompts = [encode_prompt(tokenizer, conversation, mode) for conversation in conversations]
    sampling = {
        "max_tokens": settings.max_new_tokens, "temperature": settings.temperature, "top_p": settings.top_p,
        "top_k": settings.top_k, "seed": settings.seed, "stop": list(settings.stop), "ignore_eos": settings.ignore_eos,
    }  # fmt: skip
    stop_ids = [] if settings.ignore_eos else sorted(text_side.stop_ids)
    replies = []
    with EngineClient(settings.endpoint, settings.model) as client:
        before, start = client.counters(), time.perf_counter()
        for index, prompt in enumerate(prompts):
            reply = Reply(index, prompt, settings.max_new_tokens)
            for tokens in client.stream(prompt, stop_ids, **sampling):
                reply.tokens += tokens
                reply.from_draft += [False] * len(tokens)
                if show:
                    show(tokenizer, reply)
            reply.finish = "length" if len(reply.tokens) >= reply.limit else "stop"
            if show:
                show(tokenizer, reply)
            replies.append(reply)
        seconds, after = time.perf_counter() - start, client.counters()
    drafts = after["drafts"] - before["drafts"]
    return {
        **_result(replies, tokenizer, seconds),
        "k": (after["proposed"] - before["proposed"]) // drafts if drafts else 0,
        "acceptance_length": 1 + (after["accepted"] - before["accepted"]) / drafts if drafts else 1.0,
    }


def _result(replies: list[Reply], tokenizer: Any, seconds: float) -> dict[str, Any]:
    tokens = sum(len(reply.tokens) for reply in replies)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "replies": [
            {
                "text": tokenizer.decode(reply.tokens, skip_special_tokens=True),
                "finish": reply.finish,
                "tokens": reply.tokens,
            }
            for reply in replies
        ],
    }
