"""Attention of T5Gemma 2 inside vLLM: the encoder's own, and the decoder's, merged with that over its encoder.

The decoder attends by one softmax over its own positions and all positions of the encoder. No attention kernel of the
engine does that, so keys and values are written to the engine's paged caches and gathered from them here: one cache
for the decoder's positions, one (of the kind for cross attention) for the encoder's. Nothing else remembers anything,
so that requests may start, end, be preempted and have proposed tokens rejected in any order.

Inside a block the layout is ours, [position, key or value, head, width]: the engine's kernels never read these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention, CrossAttention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backend import AttentionType

from blockdraft.ops.cached_attention import grouped_attention


class Projections(nn.Module):
    """What both attentions share: projections, norms of queries and keys, and rotary embedding.

    Args:
        config: the text config of the encoder or the decoder.
    """

    def __init__(self, config: Any, layer: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        kind = config.layer_types[layer]
        parts = get_tensor_model_parallel_world_size()
        self.head_dim: int = config.head_dim
        self.num_heads = config.num_attention_heads // parts
        self.num_kv_heads = max(1, config.num_key_value_heads // parts)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.window: int | None = config.sliding_window if kind == "sliding_attention" else None
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm = GemmaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            self.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters[kind]
        )

    def project(self, hidden_NE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, Q, H], keys and values [N, K, H]; queries and keys are normalized, not rotated."""
        flat, _ = self.qkv_proj(hidden_NE)
        heads = flat.unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return self.q_norm(query.contiguous()), self.k_norm(key.contiguous()), value

    def rotate(self, positions_N: Tensor, query_NQH: Tensor, key_NKH: Tensor) -> tuple[Tensor, Tensor]:
        query, key = self.rotary_emb(positions_N, query_NQH.flatten(1), key_NKH.flatten(1))
        return query.view_as(query_NQH), key.view_as(key_NKH)

    def attend(self, query_NQH: Tensor, key_CKH: Tensor, value_CKH: Tensor, mask_NC: Tensor) -> Tensor:
        """[N, Q * H]."""
        query, key, value = (part.transpose(0, 1)[None] for part in (query_NQH, key_CKH, value_CKH))
        attended = grouped_attention(query, key, value, mask_NC[None, None], scale=self.scale)
        return attended[0].transpose(0, 1).flatten(1)


class EncoderAttention(Projections):
    """Attention of one source within itself: all of it, or a window that reaches to both sides."""

    def forward(self, hidden_SE: Tensor, positions_S: Tensor) -> Tensor:
        query, key, value = self.project(hidden_SE)
        query, key = self.rotate(positions_S, query, key)
        before = positions_S[:, None] - positions_S
        seen = torch.ones_like(before, dtype=torch.bool)
        if self.window is not None:
            seen = (before < (self.window + 1) // 2) & (-before < self.window // 2 + 1)
        output, _ = self.o_proj(self.attend(query, key, value, seen))
        return output


@dataclass(frozen=True, slots=True)
class Reach:
    """What one request of a step attends to.

    Attributes:
        queries: its rows of the step.
        own_C: where its decoder's positions lie in their cache, those within the window.
        source_S: where its encoder's positions lie in theirs.
        mask_WX: what each query sees of both, bool [W, C + S].
    """

    queries: slice
    own_C: Tensor
    source_S: Tensor
    mask_WX: Tensor


def places(block_table_row: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots in a cache of a request's positions."""
    return block_table_row[positions // block_size].long() * block_size + positions % block_size


def reaches(own: Any, cross: Any, window: int | None, own_block: int, cross_block: int) -> list[Reach]:
    """The reach of every request, from the engine's metadata of a layer's two caches."""
    starts, lengths, sources = (each.tolist() for each in (own.query_start_loc, own.seq_lens, cross.seq_lens))
    device = own.block_table.device
    found = []
    for row, length in enumerate(lengths):
        width = starts[row + 1] - starts[row]
        if not width:
            continue
        at = torch.arange(length - width, length, device=device)[:, None]
        # Blocks that have left the window may be another request's by now: they must not even be gathered.
        first = 0 if window is None else max(0, length - width - window + 1)
        keys = torch.arange(first, length, device=device)
        seen = keys <= at
        if window is not None:
            seen = seen & (keys > at - window)
        read = torch.arange(sources[row], device=device)
        found.append(
            Reach(
                slice(starts[row], starts[row + 1]),
                places(own.block_table[row], keys, own_block),
                places(cross.block_table[row], read, cross_block),
                torch.cat([seen, seen.new_ones(width, len(read))], dim=1),
            )
        )
    return found


Plans = dict[tuple[int, int, int | None], list[Reach]]
"""The reaches of one step, by a layer's metadata and window: layers whose caches lie in the same groups share them."""


class MergedAttention(Projections):
    """A decoder layer's attention to its own positions and to all of the encoder's."""

    def __init__(self, config: Any, layer: int, cache_config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__(config, layer, quant_config, prefix)
        shape = {"num_heads": self.num_heads, "head_size": self.head_dim, "scale": self.scale,
                 "num_kv_heads": self.num_kv_heads, "cache_config": cache_config}  # fmt: skip
        # Never called: they make the engine keep a cache for each, and know where its blocks are.
        self.attn = Attention(**shape, per_layer_sliding_window=self.window, prefix=f"{prefix}.attn")
        self.cross_attn = CrossAttention(
            **shape, attn_type=AttentionType.ENCODER_DECODER, prefix=f"{prefix}.cross_attn"
        )

    def _pages(self, cache: Tensor) -> Tensor:
        """A paged cache as [blocks, positions, 2, K, H]; a view, or an error."""
        return cache.view(cache.shape[0], -1, 2, self.num_kv_heads, self.head_dim)

    def forward(self, hidden_NE: Tensor, positions_N: Tensor, encoded_SE: Tensor | None, plans: Plans) -> Tensor:
        """Attend, after writing this step's keys and values.

        Args:
            encoded_SE: states of the encoder for the requests that begin in this step, one after the other in the
                order of their rows; None where none begins.
            plans: of this step, filled by the first layer that needs one.
        """
        query, key, value = self.project(hidden_NE)
        query, key = self.rotate(positions_N, query, key)
        own, _, own_cache, _ = get_attention_context(self.attn.layer_name)
        cross, _, cross_cache, _ = get_attention_context(self.cross_attn.layer_name)
        attended = query.new_zeros(len(query), self.num_heads * self.head_dim)
        if own is not None and cross is not None:  # neither is there while the engine measures memory
            own_pages, cross_pages = self._pages(own_cache), self._pages(cross_cache)
            write(own_pages, own.slot_mapping[: own.num_actual_tokens], key, value)
            if encoded_SE is not None:
                write(cross_pages, cross.slot_mapping, *self.project(encoded_SE)[1:])
            name = (id(own), id(cross), self.window)
            if name not in plans:
                plans[name] = reaches(own, cross, self.window, own_pages.shape[1], cross_pages.shape[1])
            for reach in plans[name]:
                seen = torch.cat([own_pages.flatten(0, 1)[reach.own_C], cross_pages.flatten(0, 1)[reach.source_S]])
                attended[reach.queries] = self.attend(query[reach.queries], seen[:, 0], seen[:, 1], reach.mask_WX)
        output, _ = self.o_proj(attended)
        return output


def write(pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values [N, K, H] into a cache."""
    assert len(keys) == len(slots), f"{len(keys)} keys for {len(slots)} slots of the cache"
    pages.flatten(0, 1)[slots] = torch.stack([keys, values], dim=1).to(pages.dtype)
