"""The fast argmax is argmax, first of equals included."""

from __future__ import annotations

import pytest
import torch

from blockdraft.ops.argmax import fast_argmax


@pytest.mark.parametrize("vocab", [1, 255, 1023, 1024, 1025, 1279, 1280, 2047, 5000])
@pytest.mark.parametrize("rows", [0, 1, 7, 65])
def test_equals_argmax_with_many_ties(vocab: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for levels in (2, 7, 100_000):
        logits = torch.randint(levels, (rows, vocab), generator=generator).float()
        assert torch.equal(fast_argmax(logits), logits.argmax(dim=-1))
    logits = torch.randn(rows, vocab, generator=generator)
    logits[:, -1] = 9.0
    assert torch.equal(fast_argmax(logits), logits.argmax(dim=-1))
