"""The reduced vocabulary: which tokens it keeps, the two maps, and what stays in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.vocabulary import choose_vocabulary, coverage, token_counts
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.vocabulary import DraftVocabulary, map_digest
from blockdraft.records import Example
from blockdraft.verifiers.causal import CausalVerifier
from conftest import VOCAB, tiny_config


@given(st.lists(st.integers(0, 127), max_size=300), st.integers(1, 128))
def test_most_frequent_first_then_the_smallest_ids(tokens: list[int], size: int) -> None:
    counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=VOCAB)
    ids = choose_vocabulary(counts, size).tolist()
    wanted = sorted(range(VOCAB), key=lambda token: (-int(counts[token]), token))[:size]
    assert ids == sorted(wanted)
    shuffled = torch.bincount(torch.tensor(tokens[::-1], dtype=torch.int64), minlength=VOCAB)
    assert choose_vocabulary(shuffled, size).tolist() == ids
    if tokens:
        assert coverage(counts, torch.tensor(ids)) == pytest.approx(sum(t in ids for t in tokens) / len(tokens))


def test_only_replies_are_counted() -> None:
    counts = token_counts(
        [Example.of_reply("a", [5, 5, 5], [7, 8, 8], "stop"), Example.of_reply("b", [1], [8], "stop")], VOCAB
    )
    assert {i: int(n) for i, n in enumerate(counts) if n} == {7: 1, 8: 3}


def test_maps_are_offsets_and_marks() -> None:
    vocabulary = DraftVocabulary(tiny_config(draft_vocab_size=4))
    assert not vocabulary.consistent  # no map is no vocabulary, and not the first four ids
    vocabulary.keep(torch.tensor([2, 3, 50, 127]))
    assert vocabulary.consistent
    assert vocabulary.d2t.tolist() == [2, 2, 48, 124]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [2, 3, 50, 127]
    assert vocabulary.to_verifier(torch.tensor([[0, 3], [2, 1]])).tolist() == [[2, 127], [50, 3]]
    assert vocabulary.to_draft(torch.tensor([127, 0, 50])).tolist() == [3, -1, 2]
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    full = vocabulary.expand(probs)
    assert full.shape == (VOCAB,) and float(full[50]) == pytest.approx(0.3) and float(full.sum()) == pytest.approx(1)
    vocabulary.d2t[1] += 1
    assert not vocabulary.consistent


def test_hash_depends_on_the_kept_ids_alone() -> None:
    ids = torch.tensor([2, 3, 50])
    assert map_digest(ids, 128) == map_digest(ids.clone(), 128)
    assert len({map_digest(ids, 128), map_digest(ids + 1, 128), map_digest(ids, 256), map_digest(ids[:2], 128)}) == 4


def test_a_draft_without_its_map_cannot_borrow(tiny_verifier: CausalVerifier) -> None:
    draft = BlockDraft(tiny_config(draft_vocab_size=40))
    with pytest.raises(AssertionError, match="map"):
        draft.share(tiny_verifier.embed, tiny_verifier.head_VE)
