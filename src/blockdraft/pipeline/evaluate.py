"""`blockdraft evaluate`: exact acceptance, and on request the proof by decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockdraft.decoding.compare import compare
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.identity import Difference, differences, tie_bound
from blockdraft.decoding.one_pass import OnePass, one_pass_acceptance
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline.evaluate_served import served_one_pass, served_pair, served_replies
from blockdraft.pipeline.loading import Pair, encode_all, heldout_or_file, load_pair, require_confidence
from blockdraft.progress import progress
from blockdraft.records import Example
from blockdraft.runtime import dtype_name, machine_description
from blockdraft.settings import EvaluateSettings, SamplingSettings, resolved

ONE_PASS_GROUP = 16  # examples whose verifier states are made together


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Evaluate a checkpoint; the result is one JSON-ready object whose `failures` say what was not proved."""
    conversations = heldout_or_file(settings.data_path, settings.workload, settings.max_prompts)
    pair = served_pair(settings) if settings.vllm_endpoint else load_pair(settings)
    ks = settings.k or tuple(range(1, pair.contract.draft.num_speculative_tokens + 1))
    for k in ks:
        pair.contract.require_k(k)
    require_confidence(pair, settings.confidence_threshold)
    prompts = encode_all(pair.verifier, conversations, pair.mode)
    sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens)
    if settings.vllm_endpoint:
        examples = served_replies(settings, prompts, sorted(pair.verifier.stop_ids))
        outcomes, tokens = served_one_pass(settings, pair, examples, ks), sum(map(_reply_tokens, examples))
    else:
        engine = DecodingEngine(pair.verifier, None, 0, sampling)
        with progress("plain decoding", len(prompts)) as advance:
            plain = engine.generate(prompts, settings.batch_size, on_done=advance)
        outcomes = one_pass(pair, plain, ks, settings.confidence_threshold)
        tokens = sum(len(reply.tokens) for reply in plain)
    result: dict[str, Any] = {
        "checkpoint": str(settings.checkpoint),
        "verifier": pair.verifier.identity.name,
        "method": pair.contract.draft.method,
        "dtype": dtype_name(pair.verifier.dtype),
        "machine": machine_description(pair.verifier.device),
        "prompts": len(prompts),
        "reply_tokens": tokens,
        "disagreements": sum(outcome.disagreements for outcome in outcomes),
        "acceptance": {str(k): counts_json(counts_of(outcomes, k)) for k in ks},
        "failures": [],
        "settings": resolved(settings),
    }
    if settings.decode:
        threshold = settings.confidence_threshold
        result["decoding"] = {
            str(k): prove_by_decoding(pair, prompts, k, sampling, settings.batch_size, threshold=threshold) for k in ks
        }
        result["failures"] += [
            f"K={k}: {line}" for k, proof in result["decoding"].items() for line in proof["failures"]
        ]
    return result


def _reply_tokens(example: Example) -> int:
    return sum(end - start for start, end in example.targets)


def one_pass(pair: Pair, replies: Sequence[Reply], ks: Sequence[int], threshold: float = 0.0) -> list[OnePass]:
    """One-pass acceptance of replies, by prompt."""
    examples = [reply.example(str(reply.index)) for reply in replies]
    outcomes: list[OnePass] = []
    with progress("one-pass acceptance", len(examples)) as advance:
        for first in range(0, len(examples), ONE_PASS_GROUP):
            group = examples[first : first + ONE_PASS_GROUP]
            outcomes += one_pass_acceptance(pair.verifier, pair.draft, group, ks, threshold)
            advance(len(group))
    return outcomes


def proof_failures(
    prompts: int, wrong: int, outcomes: Sequence[OnePass], with_draft: Sequence[Reply], k: int, exact: bool
) -> list[str]:
    """What a proof by decoding did not prove, a line each.

    Args:
        wrong: replies with the draft that are not the verifier's own and not near-ties either.
        exact: in float32; in half precision rounds may differ wherever two proposals nearly tie.
    """
    lines = []
    if wrong:
        lines.append(f"{wrong} of {prompts} replies with the draft are not the verifier's own")
    if not exact:
        return lines
    if other := prompts - num_same_rounds(outcomes, with_draft, k):
        lines.append(f"{other} of {prompts} replies took other rounds than one pass predicts")
    if foreign := sum(outcome.disagreements for outcome in outcomes):
        lines.append(f"{foreign} tokens decoded without the draft are not the most likely ones in one pass")
    return lines


def num_same_rounds(outcomes: Sequence[OnePass], with_draft: Sequence[Reply], k: int) -> int:
    """Replies whose rounds are those that one pass predicts."""
    return sum(outcome.rounds[k] == reply.rounds for outcome, reply in zip(outcomes, with_draft, strict=True))


def counts_of(outcomes: Sequence[OnePass], k: int) -> AcceptanceCounts:
    return AcceptanceCounts.of([r for outcome in outcomes for r in outcome.rounds[k]], k)


def counts_json(counts: AcceptanceCounts) -> dict[str, Any]:
    """Raw counts and what is derived from them."""
    return {
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.acceptance_rate,
        "rounds": counts.rounds,
        "proposed": counts.proposed,
        "accepted": counts.accepted,
        "accepted_per_position": list(counts.accepted_per_position),
    }


def prove_by_decoding(
    pair: Pair,
    prompts: Sequence[list[int]],
    k: int,
    sampling: SamplingSettings,
    batch_size: int,
    ks: Sequence[int] = (),
    threshold: float = 0.0,
) -> dict[str, Any]:
    """Decode with and without the draft: speed, token identity, and whether the counts equal the one-pass ones.

    `ks` are further numbers of proposed tokens whose one-pass acceptance is wanted on the same replies.
    """
    plain_engine = DecodingEngine(pair.verifier, None, 0, sampling)
    draft_engine = DecodingEngine(pair.verifier, pair.draft, k, sampling, threshold)
    with progress(f"decoding both ways, K={k}", len(prompts)) as advance:
        both = compare(plain_engine, draft_engine, prompts, batch_size, advance)
    outcomes = one_pass(pair, both.plain, sorted({k, *ks}), threshold)
    found = explained_differences(pair, both.plain, both.with_draft)
    ties = sum(difference.is_tie for difference in found)
    exact = pair.verifier.dtype == torch.float32
    decoded = AcceptanceCounts.of([r for reply in both.with_draft for r in reply.rounds], k)
    return {
        "failures": proof_failures(len(prompts), len(found) - ties, outcomes, both.with_draft, k, exact),
        "batch_size": batch_size,
        "plain_tokens_per_second": both.plain_rate,
        "draft_tokens_per_second": both.draft_rate,
        "speedup": both.speedup,
        "identical": len(prompts) - len(found),
        "ties": ties,
        "mismatches": len(found) - ties,
        "tie_bound": max((d.bound for d in found), default=0.0),
        "largest_gap": max((d.gap for d in found if d.gap is not None), default=0.0),
        "same_rounds_as_one_pass": num_same_rounds(outcomes, both.with_draft, k),
        "acceptance_length": decoded.acceptance_length,
        "one_pass": {str(each): counts_json(counts_of(outcomes, each)) for each in sorted({k, *ks})},
    }


def explained_differences(pair: Pair, plain: Sequence[Reply], with_draft: Sequence[Reply]) -> list[Difference]:
    """Differences between two sets of replies, with float32 gaps; a float32 verifier is loaded only if needed."""
    if all(a.tokens == b.tokens for a, b in zip(plain, with_draft, strict=True)):
        return []
    exact = pair.exact_verifier()
    return differences(exact, plain, with_draft, tie_bound(exact, pair.verifier, plain))
