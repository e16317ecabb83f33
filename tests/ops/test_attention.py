"""Chunked and FlexAttention against the dense reference implementation, values and gradients, at awkward sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from blockdraft.data.packing import pack_row
from blockdraft.ops import attention
from blockdraft.ops.anchors import choose_anchors
from blockdraft.ops.flex import flex_attention_of
from blockdraft.ops.masks import context_mask
from conftest import random_example

LAYOUTS = {
    "one block": [(9, 7)],
    "one token of context": [(4, 1)],
    "odd sizes": [(63, 20), (7, 2), (65, 30)],
    "many short": [(5, 2)] * 7,
    "chunk boundary": [(90, 10)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [2, 7, 8])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (9, False), (None, True), (10, True)])
def test_equals_the_dense_twin(layout: str, block_size: int, window: int | None, causal: bool) -> None:
    examples = [random_example(length, start, i) for i, (length, start) in enumerate(LAYOUTS[layout])]
    row = pack_row(examples)
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    n, t = len(blocks), len(row.tokens)
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = (
        leaf(n, block_size, 6, 8),
        leaf(n, block_size, 2, 8),
        leaf(n, block_size, 2, 8),
        leaf(t, 2, 8),
        leaf(t, 2, 8),
    )
    fast = attention.ChunkedAttention(blocks, block_size, window, causal)(*tensors)
    plain = attention.plain_attention(*tensors, blocks, window, causal)
    torch.testing.assert_close(fast, plain)
    # Forward only: on a CPU FlexAttention has no backward.
    flex = flex_attention_of(blocks, t, block_size, window, causal)(*(tensor.detach() for tensor in tensors))
    torch.testing.assert_close(flex, plain.detach(), rtol=1e-4, atol=1e-5)
    weight = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    fast_grads = torch.autograd.grad((fast * weight).sum(), tensors)
    plain_grads = torch.autograd.grad((plain * weight).sum(), tensors)
    for got, wanted in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("window", [None, 7])
def test_chunks_cover_every_block_once_and_its_whole_context(window: int | None) -> None:
    row = pack_row([random_example(63, 20, 0), random_example(40, 3, 1)])
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    chunks = attention._chunks(blocks, 6, window)
    assert [i for chunk in chunks for i in range(chunk.part.start, chunk.part.stop)] == list(range(len(blocks)))
    wanted = context_mask(blocks, 103, 6, window)
    for chunk in chunks:
        assert len(set(blocks.starts[chunk.part].tolist())) == 1
        assert torch.equal(chunk.visible, wanted[chunk.part, :, chunk.context])
        assert int(wanted[chunk.part].sum()) == int(chunk.visible.sum())


@pytest.mark.parametrize(("window", "causal"), [(None, False), (9, False), (None, True), (10, True)])
def test_gradients_of_flex_attention_equal_those_of_the_reference(
    window: int | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch rejects FlexAttention's backward on the CPU; behind that check is its own plain implementation."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    row = pack_row([random_example(length, start, length) for length, start in LAYOUTS["odd sizes"]])
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(blocks), 7, 6, 8), *[(len(blocks), 7, 2, 8)] * 2, *[(len(row.tokens), 2, 8)] * 2)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    outs = (
        flex_attention_of(blocks, len(row.tokens), 7, window, causal)(*tensors),
        attention.plain_attention(*tensors, blocks, window, causal),
    )
    weight = torch.randn(outs[0].shape, generator=generator)
    found, wanted = (torch.autograd.grad((out * weight).sum(), tensors) for out in outs)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)


def test_the_device_of_the_blocks_chooses_the_kernel() -> None:
    row = pack_row([random_example(9, 7, 0)])
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    kinds = {device: attention.training_attention(blocks.to(device), 9, 4, None, False) for device in ("cpu", "meta")}
    assert isinstance(kinds["cpu"], attention.ChunkedAttention)
    assert kinds["meta"].func is attention.plain_attention


def test_no_blocks() -> None:
    row = pack_row([random_example(4, 3, 0)])
    blocks = choose_anchors(row.loss_mask, row.lengths, max_anchors=0)
    assert len(blocks) == 0
    empty = torch.zeros(0, 8, 4, 8)
    out = attention.ChunkedAttention(blocks, 8, None, False)(
        empty, empty[:, :, :2], empty[:, :, :2], torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    )
    assert out.shape == (0, 8, 4, 8)
    tensors = (empty, empty[:, :, :2], empty[:, :, :2], torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))
    assert attention.plain_attention(*tensors, blocks, None, False).shape == (0, 8, 4, 8)
