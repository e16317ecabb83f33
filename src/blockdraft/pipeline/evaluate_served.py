"""`blockdraft evaluate --vllm-endpoint`: exact acceptance where the verifier is in a server and not in this process.

The server decodes the replies and gives their hidden states; the draft runs here. So a draft of a verifier that the
reference engine cannot drive, or that does not fit, is evaluated as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch

from blockdraft.checkpoints.store import load_draft, read_contract
from blockdraft.decoding.one_pass import OnePass, rounds_of_example
from blockdraft.pipeline.loading import Pair, chat_mode_of, trained_dtype, verifier_for
from blockdraft.progress import progress
from blockdraft.records import Example
from blockdraft.runtime import limit_threads, resolve_device
from blockdraft.serving.client import EngineClient
from blockdraft.settings import EvaluateSettings
from blockdraft.training.engine_states import EngineStates
from blockdraft.training.hidden_states import grouped
from blockdraft.verifiers.base import Verifier
from blockdraft.verifiers.parts import read_parts


def served_pair(settings: EvaluateSettings) -> Pair:
    """A checkpoint with the parts of its verifier that a draft shares."""
    limit_threads(settings.threads)
    device, contract = resolve_device(settings.device), read_contract(settings.checkpoint)
    name, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    dtype = trained_dtype(settings.dtype, contract, device)
    parts = read_parts(name, dtype, device, settings.trust_remote_code, revision)
    draft, contract = load_draft(settings.checkpoint, parts, dtype)
    mode = chat_mode_of(settings.checkpoint, settings.thinking)
    # Nothing below asks it for states: the servers give them.
    return Pair(cast(Verifier, parts), draft, contract, mode, settings.trust_remote_code)


def served_replies(settings: EvaluateSettings, prompts: Sequence[list[int]], stop_ids: Sequence[int]) -> list[Example]:
    """What the servers answer to prompts, greedily, `batch_size` at a time.

    Raises:
        InputError: no vLLM server answers.
        BlockdraftError: one stopped in the middle.
    """
    urls = settings.vllm_endpoint
    with (
        contextlib.ExitStack() as opened, ThreadPoolExecutor(settings.batch_size) as pool,
        progress("replies of the server", len(prompts)) as advance,
    ):  # fmt: skip
        clients = [opened.enter_context(EngineClient(url)) for url in urls]

        def ask(number: int) -> Example:
            client = clients[number % len(clients)]
            prompt = prompts[number]
            served = client.complete(prompt, list(stop_ids), max_tokens=settings.max_new_tokens, temperature=0.0)
            advance()
            finish = "stop" if served.tokens and served.tokens[-1] in stop_ids else "length"
            return Example.of_reply(str(number), prompt, served.tokens, finish)

        return list(pool.map(ask, range(len(prompts))))


def served_one_pass(
    settings: EvaluateSettings, pair: Pair, examples: Sequence[Example], ks: Sequence[int]
) -> list[OnePass]:
    """One-pass acceptance of replies, from the servers' states of them."""
    provider = EngineStates(settings.vllm_endpoint, pair.verifier, pair.draft.config.target_layer_ids)
    outcomes: list[OnePass] = []
    try:
        provider.available(examples)
        with progress("one-pass acceptance", len(examples)) as advance, torch.inference_mode():
            for group in grouped(range(len(examples))):
                chosen = [examples[index] for index in group]
                for example, states in zip(chosen, provider.get(chosen), strict=True):
                    rounds = rounds_of_example(pair.draft, example, states.taps, ks, settings.confidence_threshold)
                    tokens = torch.tensor(example.input_ids, device=states.greedy.device)
                    wrong = sum(int((states.greedy[a - 1 : b - 1] != tokens[a:b]).sum()) for a, b in example.targets)
                    outcomes.append(OnePass(rounds, wrong))
                advance(len(chosen))
    finally:
        provider.close()
    return outcomes
