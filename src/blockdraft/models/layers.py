"""The draft's decoder layer: Qwen3's, with keys and values also made from the verifier's context.

Queries come from the block alone. Context keys skip the layer's input norm (the context has its own), share the
layer's k_norm, and are rotated to their own positions. Where attention looks is the caller's business: training
attends over a packed row, decoding over a cache, and both run this same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import silu

from blockdraft.draft_config import DraftConfig
from blockdraft.models.norm import RMSNorm
from blockdraft.ops.rotary import rotate

# (query [..., B, Q, H], key [..., B, K, H], value [..., B, K, H]) -> [..., B, Q, H]
Attend = Callable[..., Tensor]


class Context(NamedTuple):
    """What a layer reads of the verifier: fused taps [..., D] and the angles [..., H] of their positions."""

    hidden: Tensor
    cos: Tensor
    sin: Tensor


class DraftAttention(nn.Module):
    """Grouped-query attention with per-head RMSNorm on queries and keys, and optional context projections."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.separate = config.context_kv == "separate"
        if self.separate:
            self.k_proj_target = nn.Linear(config.hidden_size, kv_size, bias=False)
            self.v_proj_target = nn.Linear(config.hidden_size, kv_size, bias=False)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def context_kv(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, H] of a context."""
        key_proj = self.k_proj_target if self.separate else self.k_proj
        value_proj = self.v_proj_target if self.separate else self.v_proj
        key = rotate(self.k_norm(self._heads(key_proj(context.hidden))), context.cos, context.sin)
        return key, self._heads(value_proj(context.hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, context: Context | None = None) -> Tensor:
        if context is not None:
            key, value = self.context_kv(context)
            attend = functools.partial(attend, context_key_TKH=key, context_value_TKH=value)
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        value = self._heads(self.v_proj(x))
        return self.o_proj(attend(query, key, value).flatten(-2))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm residual layer on the slots of a block, x [..., B, D].

    With a `context`, its keys and values are computed here and given to `attend`: where parameters are sharded, they
    are whole only while the layer runs.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, context: Context | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, context)
        return x + self.mlp(self.post_attention_layernorm(x))
