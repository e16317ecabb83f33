"""What is wrapped around methods of vLLM's DFlashProposer (0.32, V1 runner).

Each function takes the proposer and the engine's own method. Drafts of the engine's classes pass through untouched, but
for the check of K against the contract and the record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.decoding.proposals import propose as choose_proposals
from blockdraft.errors import InputError
from blockdraft.vllm_plugin.draft_model import BlockDraftForCausalLM
from blockdraft.vllm_plugin.facts import STATED, contract_in
from blockdraft.vllm_plugin.record import RECORD_PATH, append

Stock = Callable[..., Any]


def _ours(proposer: Any) -> BlockDraftForCausalLM | None:
    model = proposer.model
    model = model.unwrap() if hasattr(model, "unwrap") else model  # inside a CUDA graph wrapper
    return model if isinstance(model, BlockDraftForCausalLM) else None


def _slots(proposer: Any) -> int:
    """Slots of a block: the anchor's own proposes, or stands before those that do."""
    model = _ours(proposer)
    from_anchor = model is not None and model.draft_config.sample_from_anchor
    return proposer.num_speculative_tokens + (0 if from_anchor else 1)


def _first_slots(proposer: Any, buffer: Tensor, rows: int) -> Tensor:
    """The entry of each block's anchor in a buffer that holds the slots of all blocks, [rows]."""
    slots = _slots(proposer)
    return buffer[: rows * slots].view(rows, slots)[:, 0]


def init(proposer: Any, stock: Stock, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
    """Reject a K that the draft was not trained for; remember who knows the requests of a batch."""
    stock(proposer, vllm_config, device, runner)
    proposer._blockdraft_runner = runner
    engine_config = proposer.draft_model_config.hf_config
    if hasattr(engine_config, STATED):
        contract = contract_in(engine_config)
        contract.require_k(proposer.num_speculative_tokens, "num_speculative_tokens")


def validate_same_kv_cache_group(proposer: Any, stock: Stock, kv_cache_config: Any) -> None:
    """Say what to do when the engine's caches cannot hold the draft's layers together."""
    try:
        stock(proposer, kv_cache_config)
    except AssertionError:
        groups = [len(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        raise InputError(
            "draft layers",
            f"spread over several of the engine's cache groups (of {groups} layers)",
            "vLLM's V1 runner keeps a draft in one; train it with the verifier's --num-key-value-heads and --head-dim, "
            "without --sliding-window",
        ) from None


def set_inputs_first_pass(proposer: Any, stock: Stock, *args: Any, **kwargs: Any) -> tuple[int, Tensor, Any]:
    """Blocks that sample from the anchor have one slot fewer, and all of them propose."""
    model = _ours(proposer)
    proposed = proposer.num_speculative_tokens  # 0 where K depends on the load: the context is written all the same
    if model is None or not model.draft_config.sample_from_anchor or not proposed:
        return stock(proposer, *args, **kwargs)
    proposer.num_speculative_tokens = proposed - 1
    try:
        total, _, metadata = stock(proposer, *args, **kwargs)
    finally:
        proposer.num_speculative_tokens = proposed
    return total, proposer.arange[:total], metadata


def sample_draft_tokens(
    proposer: Any, stock: Stock, hidden_states: Tensor, sampling_metadata: Any
) -> tuple[Tensor, Tensor | None]:
    """Choose tokens by the code that the reference engine runs, sequential heads included.

    Args:
        hidden_states: of the slots that propose, request by request, [R * K, D].

    Returns:
        Verifier ids [R * K], and where the engine wants them the distributions they were drawn from [R * K, V].
    """
    model = _ours(proposer)
    if model is None:
        return stock(proposer, hidden_states, sampling_metadata)
    hidden = hidden_states.unflatten(0, (-1, proposer.num_speculative_tokens))
    anchors = _first_slots(proposer, proposer.input_ids, len(hidden)).long()
    sampled = proposer._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
    drawn_from: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        if not sampled:
            return logits.argmax(dim=-1)
        tokens, probs = proposer._sample_from_logits(logits.flatten(0, -2).clone(), sampling_metadata)
        drawn_from.append(model.over_verifier_vocabulary(probs).view(len(hidden), -1, model.config.vocab_size))
        return tokens.view(logits.shape[:-1])

    tokens = choose_proposals(model, hidden, anchors, choose).tokens
    return tokens.flatten(), torch.cat(drawn_from, dim=1).flatten(0, 1) if drawn_from else None


def propose(proposer: Any, stock: Stock, *args: Any, **kwargs: Any) -> Tensor:
    """Propose, and where a record is asked for, write down what was proposed for which request at which anchor."""
    drafted = stock(proposer, *args, **kwargs)
    path, rows = os.environ.get(RECORD_PATH), len(drafted)
    if path and drafted.shape[1]:
        requests = proposer._blockdraft_runner.input_batch.req_ids[:rows]
        anchors = _first_slots(proposer, proposer.positions, rows).tolist()
        append(Path(path), requests, anchors, drafted.tolist())
    return drafted
