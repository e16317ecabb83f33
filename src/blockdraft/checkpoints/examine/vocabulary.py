"""Checks of vocabularies, their map and special tokens."""

from __future__ import annotations

import torch
from safetensors import safe_open

from blockdraft.checkpoints.examine.facts import CheckpointFacts
from blockdraft.checkpoints.examine.finding import Findings, Statement, agree, error, not_checked
from blockdraft.checkpoints.speculators import HEAD
from blockdraft.checkpoints.store import CONFIG

MAP = ("d2t", "t2d")


def draft_vocabulary(facts: CheckpointFacts) -> Findings:
    """Config, contract, head rows, map and recorded command state one draft vocabulary."""
    size, full = facts.draft_vocab_size, facts.vocab_size
    head, mapped = facts.shape(HEAD), facts.shape("d2t")
    markov = facts.shape("markov_head.markov_w2.weight")
    asked = [Statement(f"{each.where} --draft-vocab-size", each.number("draft_vocab_size")) for each in facts.commands]
    statements = [
        Statement(f"{CONFIG} draft_vocab_size", size),
        Statement("contract draft_vocab_size", facts.draft.get("draft_vocab_size")),
        Statement(f"rows of {HEAD}", head[0] if head else None),
        Statement("length of d2t", mapped[0] if mapped else None),
        Statement("rows of markov_head.markov_w2.weight", markov[0] if markov else None),
        # A command may ask for more tokens than there are, and gets all; 0 asks for all.
        *(Statement(where, min(int(n), full or int(n))) for where, n in asked if n),
    ]
    yield from agree(statements, "one of them is of another run; export the draft again, or correct the record")
    if size is not None and full is not None and size > full:
        yield error(f"{CONFIG} draft_vocab_size", size, f"the verifier has {full} tokens")


def vocabulary_map(facts: CheckpointFacts) -> Findings:
    """A reduced vocabulary has a map, in range, ascending, both tensors alike; a full one has none."""
    size, full = facts.draft_vocab_size, facts.vocab_size
    if size is None or full is None or not facts.tensors:
        return
    if size >= full:
        for name in MAP:
            if name in facts.tensors:
                yield error(f"tensor {name}", list(facts.tensors[name].shape), "the vocabulary is not reduced")
        return
    missing = [name for name in ("d2t", HEAD) if name not in facts.tensors]
    for name in missing:
        yield error(f"tensor {name}", "missing", f"a reduced vocabulary of {size} tokens needs it")
    if "d2t" in missing:
        return
    marks = facts.shape("t2d")
    if marks is not None and marks != (full,):
        yield error("tensor t2d", list(marks), f"must be [{full}], the verifier's vocabulary")
    yield from _map_values(facts, full)


def _map_values(facts: CheckpointFacts, full: int) -> Findings:
    stored = facts.tensors["d2t"]
    with safe_open(facts.folder / stored.file, "pt") as file:
        ids = file.get_tensor("d2t").long().flatten()
    ids = ids + torch.arange(len(ids))
    outside = int(((ids < 0) | (ids >= full)).sum())
    if outside:
        yield error("tensor d2t", f"{outside} of {len(ids)} tokens", f"lie outside of 0..{full - 1}; it holds offsets")
    elif bool((ids.diff() <= 0).any()):
        yield error("tensor d2t", "not ascending", "verifier ids d + d2t[d] must ascend without repetition")
    elif "t2d" in facts.tensors:
        with safe_open(facts.folder / facts.tensors["t2d"].file, "pt") as file:
            marked = file.get_tensor("t2d").flatten().nonzero()[:, 0]
        if not torch.equal(marked, ids):
            yield error("tensor t2d", f"{len(marked)} tokens", "d2t names others; the two are of different maps")


def verifier_vocabulary(facts: CheckpointFacts) -> Findings:
    """Config, contract, stored embeddings and verifier have one vocabulary."""
    embed = facts.shape("embed_tokens.weight")
    own = facts.contract.get("verifier")
    yield from agree(
        [
            Statement(f"{CONFIG} vocab_size", facts.vocab_size),
            Statement("contract vocab_size", facts.draft.get("vocab_size")),
            Statement("contract verifier vocab_size", own.get("vocab_size") if isinstance(own, dict) else None),
            Statement("rows of embed_tokens.weight", embed[0] if embed else None),
            Statement("verifier vocab_size", facts.verifier.get("vocab_size")),
        ],
        "the draft reads and proposes ids of the verifier's vocabulary",
    )


def mask_token(facts: CheckpointFacts) -> Findings:
    """The mask token is one, lies in the vocabulary and ends no reply."""
    statements = [
        Statement(f"{CONFIG} mask_token_id", facts.config.get("mask_token_id")),
        Statement(f"{CONFIG} dflash_config mask_token_id", facts.nested.get("mask_token_id")),
        Statement("contract mask_token_id", facts.draft.get("mask_token_id")),
        *(Statement(f"{each.where} --mask-token-id", each.number("mask_token_id")) for each in facts.commands),
    ]
    yield from agree(statements, "training and serving must fill slots with the same token")
    first = next((each for each in statements if each.value is not None), None)
    if first is None:
        yield error(f"{CONFIG} mask_token_id", "missing", "vLLM does not start without it")
        return
    full = facts.vocab_size
    if not isinstance(first.value, int) or first.value < 0 or (full is not None and first.value >= full):
        yield error(first.where, first.value, f"must be a token of the vocabulary, 0..{(full or 1) - 1}")
    elif first.value in facts.verifier_stops:
        yield error(first.where, first.value, "ends the verifier's replies; a token that texts hold cannot be the mask")
    if not facts.verifier:
        yield not_checked("stop tokens and size of the verifier", "no verifier", "name it: --verifier-name-or-path")
