"""`blockdraft generate`: decode prompts with a draft in the reference engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from blockdraft.data.prompts import read_prompts
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.errors import InputError
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline.loading import Pair, encode_all, load_pair, require_confidence
from blockdraft.settings import GenerateSettings

Show = Callable[[Pair, Reply], None]


def generate(settings: GenerateSettings, show: Show | None = None) -> dict[str, Any]:
    """Decode; `show` is called with a reply after each of its rounds."""
    if bool(settings.prompt) == bool(settings.data_path):
        raise InputError("prompts", "none" if not settings.prompt else "two sources", "give prompts or --data-path")
    if settings.data_path:
        conversations = read_prompts(settings.data_path, "--data-path")
    else:
        for number, prompt in enumerate(settings.prompt, start=1):
            if not prompt.strip():
                raise InputError(f"prompt {number}", "empty", "a prompt needs some text")
        conversations = [[{"role": "user", "content": prompt}] for prompt in settings.prompt]
    pair = load_pair(settings)
    k = pair.contract.default_k if settings.k is None else settings.k
    if k:
        pair.contract.require_k(k)
    require_confidence(pair, settings.confidence_threshold)
    prompts = encode_all(pair.verifier, conversations)
    engine = DecodingEngine(pair.verifier, pair.draft, k, settings, settings.confidence_threshold)
    start = time.perf_counter()
    replies = engine.generate(prompts, settings.batch_size, (lambda reply: show(pair, reply)) if show else None)
    seconds = time.perf_counter() - start
    tokens = sum(len(reply.tokens) for reply in replies)
    counts = AcceptanceCounts.of([r for reply in replies for r in reply.rounds], k)
    return {
        "k": k,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "acceptance_length": counts.acceptance_length,
        "replies": [
            {
                "text": pair.verifier.tokenizer.decode(reply.tokens, skip_special_tokens=True),
                "finish": reply.finish,
                "tokens": reply.tokens,
                "rounds": len(reply.rounds),
            }
            for reply in replies
        ],
    }
