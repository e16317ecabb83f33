"""The attention function that verifiers run with.

torch's SDPA does the work where it can, without copying keys for grouped queries (transformers repeats each key/value
head for its group of query heads whenever a mask is given). Two things SDPA does not know are computed plainly:
a soft cap on the scores (Gemma 2, VaultGemma) and attention sinks, one supervised logit a head that takes weight and
gives no value (gpt-oss, MiMo). transformers' own SDPA function drops both without a word. An argument that is not known
here is an error, so that no family's attention can lose a part of its meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from blockdraft.ops.cached_attention import grouped_attention

NAME = "blockdraft_folded"
SCORES_AT_ONCE = 2**25  # scores that exist at once on the plain path
# Tensors and numbers without an effect on the result: what they say is in the mask already.
_IGNORED = frozenset({"sliding_window", "position_ids", "cache_position"})


def folded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: query [R, Q, W, H], key and value [R, K, C, H] -> [R, W, Q, H].

    Args:
        softcap: scores become softcap * tanh(score / softcap) before the mask.
        s_aux: attention sinks, one logit a query head, [Q].

    Raises:
        NotImplementedError: the family passes an argument that changes the result and is not known here.
    """
    for name, given in kwargs.items():
        if name not in _IGNORED and given is not None and not isinstance(given, bool):  # switches concern outputs
            raise NotImplementedError(f"attention argument {name!r} is not supported")
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
    if softcap is not None or s_aux is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return plain_attention(query, key, value, attention_mask, scale, softcap, s_aux).transpose(1, 2), None
    if attention_mask is None or query.shape[1] == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = grouped_attention(query, key, value, attention_mask, dropout, scaling)
    return out.transpose(1, 2).contiguous(), None


def plain_attention(
    query_RQWH: Tensor,
    key_RKCH: Tensor,
    value_RKCH: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Softmax attention in float32 with a soft cap and sinks, a few queries at a time.

    Args:
        mask: True where a query sees a key, or what is added to its score, [R, 1, W, C]; None is causal, where the last
            query sees every key.

    Returns:
        [R, Q, W, H].
    """
    rows, heads, width, _ = query_RQWH.shape
    kv_heads, num_keys = key_RKCH.shape[1], key_RKCH.shape[2]
    if mask is None:
        mask = torch.ones(width, num_keys, dtype=torch.bool, device=query_RQWH.device).tril(num_keys - width)[
            None, None
        ]
    keys, values = key_RKCH[:, :, None].float(), value_RKCH[:, :, None].float()  # one for each group of query heads
    at_once = max(1, SCORES_AT_ONCE // (rows * heads * num_keys))
    parts = []
    for first in range(0, width, at_once):
        part = slice(first, first + at_once)
        query = query_RQWH[:, :, part].unflatten(1, (kv_heads, -1)).float()
        scores = torch.matmul(query, keys.mT) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = mask[:, :, None, part]
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        total = scores.logsumexp(dim=-1, keepdim=True)
        if sinks_Q is not None:
            total = torch.logaddexp(total, sinks_Q.float().view(1, kv_heads, -1, 1, 1))
        parts.append(torch.matmul((scores - total).exp(), values).flatten(1, 2))
    return torch.cat(parts, dim=2).to(value_RKCH.dtype)


def register() -> str:
    """Make the function known to transformers (idempotent) and return its name."""
    AttentionInterface.register(NAME, folded_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
