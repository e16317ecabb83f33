"""The attention of anchored blocks as FlexAttention: the visibility rule as a mask function, compiled on CUDA.

The rule is `ops/masks.py`'s; `ops/attention.py` has the chunked path that CPUs run and the reference implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from blockdraft.ops.anchors import Blocks


def visibility(blocks: Blocks, row_length: int, block_size: int, window: int | None, causal: bool) -> Callable:
    """Whether query q (slot q % B of block q // B) sees key k (a position of the row, then all slots of all blocks).

    A block mask asks about whole tiles of 128, also behind the last query and key: indices are clamped, and answers
    about what does not exist are dropped by the caller of the mask.
    """
    last = len(blocks) - 1

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = (query // block_size).clamp(max=last), query % block_size
        anchor = blocks.anchors[block]
        context = (key < row_length) & (key >= blocks.starts[block]) & (key < anchor)
        if window is not None:
            context = context & (key > anchor + slot - window)
        own = (key >= row_length) & ((key - row_length) // block_size == block)
        if causal:
            own = own & ((key - row_length) % block_size <= slot)
        return context | own

    return sees


def flex_attention_of(blocks: Blocks, row_length: int, block_size: int, window: int | None, causal: bool) -> Any:
    """A `BlockAttention` by FlexAttention; the block mask is built here, once for all layers of a kind.

    Compiled on CUDA. On the CPU it runs uncompiled and forward only, which is what tests need.
    """
    device = blocks.anchors.device
    queries = len(blocks) * block_size
    if not len(blocks):
        return lambda query_NBQH, *_, **__: torch.zeros_like(query_NBQH)
    rule = visibility(blocks, row_length, block_size, window, causal)
    mask = create_block_mask(rule, None, None, queries, row_length + queries, device=device)
    kernel = _compiled() if device.type == "cuda" else flex_attention

    def attend(
        query_NBQH: Tensor, key_NBKH: Tensor, value_NBKH: Tensor, context_key_TKH: Tensor, context_value_TKH: Tensor
    ) -> Tensor:
        dtype = value_NBKH.dtype
        keys = torch.cat((context_key_TKH.to(dtype), key_NBKH.to(dtype).flatten(0, 1)))
        values = torch.cat((context_value_TKH.to(dtype), value_NBKH.flatten(0, 1)))
        query = query_NBQH.to(dtype).flatten(0, 1)
        heads_first = (tensor.transpose(0, 1)[None].contiguous() for tensor in (query, keys, values))
        out = kernel(*heads_first, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(query_NBQH.shape)

    return attend


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
