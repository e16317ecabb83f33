"""Attention of anchored blocks over their context and themselves.

`block_attention` never builds the dense mask of (T + N * B) keys: blocks come sorted by anchor, and a chunk of
neighbouring blocks attends only to the stretch of context that it can see. `block_attention_plain` is its twin: the
same function by one dense mask, for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.ops.anchors import Blocks
from blockdraft.ops.masks import context_mask, slot_mask

CHUNK_BLOCKS = 32  # blocks that share one stretch of context; more saves calls, fewer saves masked work


def block_attention(
    query_NBQH: Tensor,
    key_NBKH: Tensor,
    value_NBKH: Tensor,
    context_key_TKH: Tensor,
    context_value_TKH: Tensor,
    blocks: Blocks,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Softmax attention of every slot over its block's context and the slots of its own block.

    Args:
        context_key_TKH: keys of the packed row's positions; a block sees those that `masks.context_mask` allows.
        window: sliding window over the context, measured from the anchor; None sees the whole document.
        causal: whether a slot sees only the slots up to itself.

    Returns:
        [N, B, Q, H] in the dtype of the values.
    """
    outputs = []
    for first, last in _chunks(blocks):
        part = Blocks(blocks.anchors[first:last], blocks.starts[first:last], blocks.ends[first:last])
        outputs.append(
            _chunk_attention(
                query_NBQH[first:last],
                key_NBKH[first:last],
                value_NBKH[first:last],
                context_key_TKH,
                context_value_TKH,
                part,
                window,
                causal,
            )
        )
    return torch.cat(outputs) if outputs else torch.zeros_like(query_NBQH)


def _chunks(blocks: Blocks) -> list[tuple[int, int]]:
    """Runs of at most CHUNK_BLOCKS blocks of one document."""
    starts = blocks.starts.tolist()
    chunks: list[tuple[int, int]] = []
    first = 0
    for index in range(1, len(starts) + 1):
        if index == len(starts) or starts[index] != starts[first] or index - first == CHUNK_BLOCKS:
            chunks.append((first, index))
            first = index
    return chunks


def _chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    blocks: Blocks,
    window: int | None,
    causal: bool,
) -> Tensor:
    num_blocks, block_size, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    groups = num_heads // num_kv_heads
    start, end = int(blocks.starts[0]), int(blocks.anchors[-1])
    if window is not None:
        start = max(start, int(blocks.anchors[0]) - window)
    # The query group is folded into the query axis, so that keys are never repeated.
    query_KNGBH = query.view(num_blocks, block_size, num_kv_heads, groups, head_dim).permute(2, 0, 3, 1, 4)
    query_KNGBH = query_KNGBH * head_dim**-0.5
    keys = context_key[start:end].permute(1, 2, 0)
    context_scores = torch.matmul(query_KNGBH.reshape(num_kv_heads, -1, head_dim), keys)
    context_scores = context_scores.view(num_kv_heads, num_blocks, groups * block_size, end - start)
    block_queries = query_KNGBH.reshape(num_kv_heads, num_blocks, groups * block_size, head_dim)
    block_scores = torch.matmul(block_queries, key.permute(2, 0, 3, 1))

    positions = torch.arange(start, end, device=query.device)
    hidden = positions >= blocks.anchors[:, None]
    if window is not None:
        hidden = hidden | (positions < blocks.anchors[:, None] - window)
    context_scores = context_scores.masked_fill(hidden[None, :, None], -torch.inf)
    if causal:
        unseen = ~slot_mask(block_size, causal=True, device=query.device)
        block_scores = block_scores.masked_fill(unseen.repeat(groups, 1), -torch.inf)
    scores = torch.cat((context_scores, block_scores), dim=-1)
    weights = scores.float().softmax(dim=-1).to(value.dtype)
    context_weights, block_weights = weights.split((end - start, block_size), dim=-1)
    values = context_value[start:end].transpose(0, 1)
    out = torch.matmul(context_weights.reshape(num_kv_heads, -1, end - start), values)
    out = out.view(num_kv_heads, num_blocks, groups * block_size, head_dim)
    out = out + torch.matmul(block_weights, value.permute(2, 0, 1, 3))
    out = out.view(num_kv_heads, num_blocks, groups, block_size, head_dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_blocks, block_size, num_heads, head_dim)


def block_attention_plain(
    query_NBQH: Tensor,
    key_NBKH: Tensor,
    value_NBKH: Tensor,
    context_key_TKH: Tensor,
    context_value_TKH: Tensor,
    blocks: Blocks,
    window: int | None,
    causal: bool,
) -> Tensor:
    """`block_attention` by one dense mask over all T + N * B keys."""
    num_blocks, block_size, num_heads, head_dim = query_NBQH.shape
    groups = num_heads // key_NBKH.shape[2]
    keys = torch.cat((context_key_TKH, key_NBKH.flatten(0, 1))).repeat_interleave(groups, dim=1)
    values = torch.cat((context_value_TKH, value_NBKH.flatten(0, 1))).repeat_interleave(groups, dim=1)
    seen_context = context_mask(blocks, len(context_key_TKH), window)[:, None].expand(-1, block_size, -1)
    own = torch.eye(num_blocks, dtype=torch.bool, device=keys.device)[:, None, :, None]
    seen_slots = own & slot_mask(block_size, causal, keys.device)[None, :, None, :]
    mask = torch.cat((seen_context, seen_slots.reshape(num_blocks, block_size, -1)), dim=-1).flatten(0, 1)
    scores = torch.einsum("mqh,tqh->qmt", query_NBQH.flatten(0, 1) * head_dim**-0.5, keys)
    weights = scores.float().masked_fill(~mask, -torch.inf).softmax(dim=-1).to(values.dtype)
    return torch.einsum("qmt,tqh->mqh", weights, values).view_as(query_NBQH)


def cached_attention(query_RBQH: Tensor, keys_RKCH: Tensor, values_RKCH: Tensor, mask_RBC: Tensor) -> Tensor:
    """Attention of decoding blocks over a cache that already holds the block's own keys.

    Args:
        keys_RKCH: context keys followed by the block's own, as `RaggedKV.write` returns them.
        mask_RBC: True where a slot sees a cached position.

    Returns:
        [R, B, Q, H].
    """
    rows, block_size, num_heads, head_dim = query_RBQH.shape
    num_kv_heads = keys_RKCH.shape[1]
    groups = num_heads // num_kv_heads
    folded = query_RBQH.view(rows, block_size, num_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, num_kv_heads, groups * block_size, head_dim)
    mask = mask_RBC[:, None].repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(folded, keys_RKCH, values_RKCH, attn_mask=mask)
    out = out.view(rows, num_kv_heads, groups, block_size, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, block_size, num_heads, head_dim)
