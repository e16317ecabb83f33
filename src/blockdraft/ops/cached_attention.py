"""Attention over keys and values that a cache holds: of decoding blocks, and of verifiers."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.ops.ragged_kv import RaggedKV


def cached_attention(
    query_RBQH: Tensor, key_RBKH: Tensor, value_RBKH: Tensor, cache: RaggedKV, layer: int, mask_RBC: Tensor
) -> Tensor:
    """Attention of decoding blocks over their rows' context and themselves.

    The blocks' own keys and values are written behind the context of `cache` and not committed.

    Args:
        mask_RBC: True where a position of the cache is visible to a slot.

    Returns:
        [R, B, Q, H].
    """
    keys_RKCH, values_RKCH = cache.write(layer, key_RBKH.transpose(1, 2), value_RBKH.transpose(1, 2))
    return grouped_attention(query_RBQH.transpose(1, 2), keys_RKCH, values_RKCH, mask_RBC[:, None]).transpose(1, 2)


def grouped_attention(
    query_RQWH: Tensor,
    keys_RKCH: Tensor,
    values_RKCH: Tensor,
    mask_R1WC: Tensor,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """torch's SDPA under a mask, without copying keys for grouped queries.

    SDPA's own `enable_gqa` with a mask is slow on CPUs. Here the group is folded into the query axis: queries
    become [R, K, G * W, H], and the mask is repeated in place of the keys.

    Args:
        mask_R1WC: True where a key is visible to a query, or what is added to its score.

    Returns:
        [R, Q, W, H].
    """
    rows, heads, width, head_dim = query_RQWH.shape
    groups = heads // keys_RKCH.shape[1]
    folded = query_RQWH.reshape(rows, keys_RKCH.shape[1], groups * width, head_dim)
    mask = mask_R1WC.repeat(1, 1, groups, 1) if width > 1 and groups > 1 else mask_R1WC
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, keys_RKCH, values_RKCH, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return out.reshape(rows, heads, width, head_dim)
