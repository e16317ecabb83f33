"""Decoding and exact acceptance on a device."""

from __future__ import annotations

import functools
import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.identity import differences, tie_bound
from blockdraft.decoding.one_pass import example_proposals, one_pass_acceptance
from blockdraft.decoding.slot_gaps import SlotGaps
from blockdraft.models.block_draft import BlockDraft
from blockdraft.settings import SamplingSettings
from conftest import tiny_config, tiny_draft
from devices.stage import PROMPTS, Check, require_close, verifier_on

DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "dflare": {"method": "dflare", "windows": (9, None), "causal": (True, False)},
    "dspark": {"method": "dspark", "draft_vocab_size": 60},
    "gated": {"method": "dspark", "sequential_head": "gated"},
    "rnn": {"method": "dspark", "sequential_head": "rnn"},
}
GREEDY = SamplingSettings(max_new_tokens=9, ignore_eos=True)
SAMPLED = SamplingSettings(max_new_tokens=6, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=3)


@functools.cache
def _draft(device: str, name: str, kind: str = "llama") -> BlockDraft:
    return tiny_draft(verifier_on(device, kind), tiny_config(**DRAFTS[name]))


@functools.cache
def _replies(
    device: str, name: str | None, kind: str = "llama", threshold: float = 0.0,
    sampling: SamplingSettings = GREEDY,
) -> list[Reply]:  # fmt: skip
    draft = None if name is None else _draft(device, name, kind)
    k = 0 if draft is None else draft.config.num_speculative_tokens
    return DecodingEngine(verifier_on(device, kind), draft, k, sampling, threshold).generate(PROMPTS, 2)


def _greedy(device: str, _folder: Path, name: str, kind: str, threshold: float = 0.0) -> None:
    """Plain and drafted text are the CPU's; rounds are those of one pass, there and here."""
    plain, drafted = _replies(device, None, kind), _replies(device, name, kind, threshold)
    wanted = _replies("cpu", name, kind, threshold)
    assert [r.tokens for r in plain] == [r.tokens for r in drafted] == [r.tokens for r in wanted]
    assert [r.rounds for r in drafted] == [r.rounds for r in wanted]
    draft = _draft(device, name, kind)
    texts = [reply.example(str(reply.index)) for reply in plain]
    k = draft.config.num_speculative_tokens
    outcomes = one_pass_acceptance(verifier_on(device, kind), draft, texts, [k, 2], threshold)
    assert [outcome.rounds[k] for outcome in outcomes] == [reply.rounds for reply in drafted]
    assert not any(outcome.disagreements for outcome in outcomes)


def _sampled(device: str, _folder: Path, name: str | None) -> None:
    """The same seed gives the same text; the CPU's where the device draws there."""
    found = _replies(device, name, sampling=SAMPLED)
    again = _replies.__wrapped__(device, name, sampling=SAMPLED)
    assert [reply.tokens for reply in found] == [reply.tokens for reply in again]
    if torch.Generator(device).device.type == "cpu":
        assert [reply.tokens for reply in found] == [r.tokens for r in _replies("cpu", name, sampling=SAMPLED)]


def _gaps(device: str, _folder: Path, name: str) -> None:
    """Proposals after every token, and float32 gaps of their slots, are the CPU's."""
    found = []
    text = _replies("cpu", None)[1].example("1")
    for where in (device, "cpu"):
        exact = SimpleNamespace(verifier=verifier_on(where), draft=_draft(where, name))
        proposals = example_proposals(exact.verifier, exact.draft, text, exact.draft.config.num_speculative_tokens)
        gaps = SlotGaps(exact, exact, text, proposals)
        assert gaps.bound < 1e-3
        ids = [first[0] for first in proposals.values()]
        found.append((proposals, gaps, [gaps.gap(anchor, 0, ids[0], ids[-1]) for anchor in gaps.anchors]))
    assert found[0][0] == found[1][0]
    require_close(found[0][1].logits_NKV, found[1][1].logits_NKV)
    require_close(torch.tensor(found[0][2]), torch.tensor(found[1][2]))
    assert SlotGaps(exact, exact, text, {}).bound == 0.0


def _ties(device: str, _folder: Path) -> None:
    """What explains a difference in half precision is measured on the device."""
    exact, rounded = verifier_on(device), verifier_on(device, dtype=torch.bfloat16)
    plain = _replies(device, None)
    assert 0 < tie_bound(exact, rounded, plain) <= 1
    other = [Reply(reply.index, reply.prompt, reply.limit, [*reply.tokens[:-1], 5]) for reply in plain]
    assert all(each.gap is not None for each in differences(exact, plain, other, 0.0))


CHECKS = (
    *(
        Check(f"greedy decoding and one pass: {name}, {kind}", partial(_greedy, name=name, kind=kind))
        for name, kind in [*itertools.product(DRAFTS, ("llama",)), ("dflash", "gemma3"), ("dflare", "t5gemma2")]
    ),
    Check("a proposal cut by confidence", partial(_greedy, name="gated", kind="llama", threshold=0.3)),
    Check("sampling without a draft", partial(_sampled, name=None)),
    *(Check(f"sampling: {name}", partial(_sampled, name=name)) for name in ("dflash", "dspark", "rnn")),
    *(Check(f"gaps of slots: {name}", partial(_gaps, name=name)) for name in ("dflash", "dspark")),
    Check("ties", _ties),
)
