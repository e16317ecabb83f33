"""The attention function that verifiers run with: torch's SDPA without copying keys for grouped queries.

transformers repeats each key/value head for its group of query heads whenever a mask is given, and SDPA's own
`enable_gqa` with a mask is slow on processors. Both are avoided by folding the group into the query axis: queries
[R, K*G, W, H] become [R, K, G*W, H], and the mask is repeated instead of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "blockdraft_folded"


def folded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: query [R, Q, W, H], key and value [R, K, C, H] -> [R, W, Q, H]."""
    groups = query.shape[1] // key.shape[1]
    if attention_mask is None or groups == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, width, head_dim = query.shape
    folded = query.reshape(rows, key.shape[1], groups * width, head_dim)
    mask = attention_mask[..., : key.shape[2]]
    if width > 1:
        mask = mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(rows, heads, width, head_dim).transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the function known to transformers (idempotent) and return its name."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
