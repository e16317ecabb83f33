"""The attention function that verifiers run with: torch's SDPA without copying keys for grouped queries.

transformers repeats each key/value head for its group of query heads whenever a mask is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from blockdraft.ops.attention import grouped_attention

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
    out = grouped_attention(query, key, value, attention_mask[..., : key.shape[2]], dropout, scaling)
    return out.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the function known to transformers (idempotent) and return its name."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
