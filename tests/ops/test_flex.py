"""FlexAttention as the GPU is given it: its rule, its block mask, its values and its gradients, on the CPU.

torch 2.13 has FlexAttention on the CPU, but for the backward pass, which one guard of it rejects. Behind the guard lies
torch's plain formula, which differentiates: gradients are compared with the guard taken away. So what is proved here is
the rule, the tiles and what we do around the kernel. CUDA's own kernel is not (`docs/cuda.md`), and the one that torch
would compile for the CPU is none: its C++ does not compile for a rule that reads tensors at sizes that change.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from blockdraft.data.packing import pack_row
from blockdraft.ops import flex
from blockdraft.ops.anchors import Blocks, choose_anchors
from blockdraft.ops.attention import plain_attention
from blockdraft.ops.masks import context_mask, slot_mask
from conftest import random_example

TILE = 128
BLOCK_SIZE = 7
# Length and start of the reply of each example: rows under, at and over a tile, and of several. An example of two
# tokens starts no block, and one of three starts one, which sees one token.
ROWS = {
    "3": [(3, 1)],
    "7": [(7, 3)],
    "63": [(63, 20)],
    "65": [(65, 1)],
    "128": [(63, 20), (65, 30)],
    "137": [(2, 1), (7, 2), (63, 20), (65, 30)],
    "400": [(400, 150)],
    "500": [(330, 20), (2, 1), (168, 120)],
}
KINDS = {"full": (None, False), "causal": (None, True), "sliding": (9, False), "sliding causal": (9, True)}
every_row = pytest.mark.parametrize("row", ROWS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def blocks_of(row: str) -> tuple[Blocks, int]:
    """At most 40 blocks of a row, and the row's length."""
    packed = pack_row([random_example(length, start, i) for i, (length, start) in enumerate(ROWS[row])])
    generator = torch.Generator().manual_seed(0)
    return choose_anchors(packed.loss_mask, packed.lengths, 40, generator), len(packed.tokens)


def dense_mask(blocks: Blocks, row_length: int, window: int | None, causal: bool) -> torch.Tensor:
    """What every slot sees, of the row and of all slots, bool [N * B, T + N * B]."""
    context = context_mask(blocks, row_length, BLOCK_SIZE, window).flatten(0, 1)
    own = torch.block_diag(*[slot_mask(BLOCK_SIZE, causal).int()] * len(blocks)).bool()
    return torch.cat((context, own), dim=1)


def leaves(blocks: Blocks, row_length: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of slots, keys and values of the row: three query heads for each of two others."""
    generator = torch.Generator().manual_seed(0)
    slots, row = (len(blocks), BLOCK_SIZE), (row_length,)
    shapes = ((*slots, 6, 16), (*slots, 2, 16), (*slots, 2, 16), (*row, 2, 16), (*row, 2, 16))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


@every_row
@every_kind
def test_the_rule_is_that_of_the_dense_masks(row: str, kind: str) -> None:
    blocks, length = blocks_of(row)
    rule = flex.visibility(blocks, length, BLOCK_SIZE, *KINDS[kind])
    queries = torch.arange(len(blocks) * BLOCK_SIZE)[:, None]
    keys = torch.arange(length + len(queries))[None]
    nothing = torch.tensor(0)
    assert torch.equal(rule(nothing, nothing, queries, keys), dense_mask(blocks, length, *KINDS[kind]))


@every_row
@every_kind
def test_a_tile_that_is_left_out_is_unseen_and_one_that_is_not_masked_is_seen_whole(row: str, kind: str) -> None:
    """The plain formula asks the rule everywhere; a kernel asks it in tiles that are marked as partly seen alone."""
    blocks, length = blocks_of(row)
    rule = flex.visibility(blocks, length, BLOCK_SIZE, *KINDS[kind])
    wanted = dense_mask(blocks, length, *KINDS[kind])
    mask = torch_flex.create_block_mask(rule, None, None, *wanted.shape, device="cpu")
    partly = tiles(mask.kv_num_blocks, mask.kv_indices)
    wholly = tiles(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partly & wholly).any()
    for down in range(partly.shape[0]):
        for across in range(partly.shape[1]):
            tile = wanted[down * TILE : (down + 1) * TILE, across * TILE : (across + 1) * TILE]
            assert partly[down, across] or wholly[down, across] or not tile.any()
            assert not wholly[down, across] or tile.all()
    if (row, kind) == ("400", "full"):
        assert wholly.any() and not (partly | wholly).all()


def tiles(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Which tiles a block mask lists, bool [rows of tiles, columns of tiles]."""
    listed = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for down, count in enumerate(counts[0, 0].tolist()):
        listed[down, indices[0, 0, down, :count].long()] = True
    return listed


@every_row
@every_kind
def test_values_and_gradients_are_those_of_plain_attention(
    row: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    blocks, length = blocks_of(row)
    tensors = leaves(blocks, length)
    found = flex.flex_attention_of(blocks, length, BLOCK_SIZE, *KINDS[kind])(*tensors)
    wanted = plain_attention(*tensors, blocks, *KINDS[kind])
    torch.testing.assert_close(found, wanted)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), tensors) for out in (found, wanted)), strict=True)
    for got, right in pairs:
        torch.testing.assert_close(got, right)


def test_torch_rejects_the_backward_pass_on_the_cpu() -> None:
    """Once it does not, the guard above need not be taken away."""
    blocks, length = blocks_of("7")
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex.flex_attention_of(blocks, length, BLOCK_SIZE, None, False)(*leaves(blocks, length))
