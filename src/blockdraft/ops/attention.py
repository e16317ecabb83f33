"""Attention of anchored blocks over their context and themselves, in training: over a packed row.

`ChunkedAttention` never builds the dense mask of (T + N * B) keys: blocks come sorted by anchor, and a chunk of
neighboring blocks attends only to the stretch of context that it can see, in torch's flash kernel for CPUs.
What a block's slots see of each other is small and computed plainly; the two softmaxes are merged by their
log-sum-exps, exactly (Dao et al., "FlashAttention", 2022). Scores are never stored. On CUDA, FlexAttention compiles
the same rule into one kernel (`ops/flex.py`). `plain_attention`, by one dense mask, is the reference implementation of
both, and what other devices get. `ops/cached_attention.py` has the attention of decoding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.ops.anchors import Blocks
from blockdraft.ops.masks import context_mask, slot_mask

# Blocks that share one stretch of context: the kernel is faster on many rows, but what lies between the first and the
# last anchor is computed and masked. So a chunk grows while that is little, absolutely or beside what all see.
CHUNK_BLOCKS = 64
CHUNK_SPAN = 128
CHUNK_SHARE = 0.2

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class BlockAttention(Protocol):
    """Softmax attention of every slot over its block's context and the slots of its own block."""

    def __call__(
        self,
        query_NBQH: Tensor,
        key_NBKH: Tensor,
        value_NBKH: Tensor,
        context_key_TKH: Tensor,
        context_value_TKH: Tensor,
    ) -> Tensor:
        """Keys and values of the blocks' slots and of the packed row's positions to [N, B, Q, H]."""
        ...


def training_attention(
    blocks: Blocks, row_length: int, block_size: int, window: int | None, causal: bool
) -> BlockAttention:
    """The attention of all layers of a kind over one packed row, chosen by the device that the blocks are on.

    CUDA gets FlexAttention and the CPU its own flash kernel in chunks (`ChunkedAttention`). Both reject other devices:
    those get the reference implementation (`plain_attention`), which stores the scores, [Q, N * B, T + N * B] a layer.

    Args:
        blocks: on the device of the tensors that will attend.
        window: sliding window over the context, which moves with the slot; None sees the whole example.
        causal: whether a slot sees only the slots up to itself.
    """
    device = blocks.anchors.device.type
    if device == "cuda":
        from blockdraft.ops.flex import flex_attention_of  # slow to import, and of no use without CUDA

        return flex_attention_of(blocks, row_length, block_size, window, causal)
    if device == "cpu":
        return ChunkedAttention(blocks, block_size, window, causal)
    return functools.partial(plain_attention, blocks=blocks, window=window, causal=causal)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighboring blocks of one example and the stretch of context that they can see.

    Attributes:
        visible: True where a position of the stretch is visible to a slot, [n, B, width].
    """

    part: slice
    context: slice
    visible: Tensor


class ChunkedAttention:
    """`BlockAttention` by chunks of blocks; differentiable in all five tensors.

    Every slot needs at least one position of context. `choose_anchors` grants it, since a reply follows a prompt, and
    so does a window that is larger than a block (`DraftConfig`).
    The softmax is float32 for half dtypes; the result has the dtype of the values.
    """

    def __init__(self, blocks: Blocks, block_size: int, window: int | None, causal: bool) -> None:
        self.block_size = block_size
        self.chunks = _chunks(blocks, block_size, window)
        self.visible_slots = slot_mask(block_size, causal, blocks.anchors.device)
        self.causal = causal
        self._masks: dict[torch.dtype, list[Tensor]] = {}

    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        """Additive masks [1, 1, n * B, width] of the chunks, made once for all layers and for the backward pass."""
        if dtype not in self._masks:
            self._masks[dtype] = [
                torch.zeros(chunk.visible.shape, dtype=dtype, device=chunk.visible.device)
                .masked_fill_(~chunk.visible, -torch.inf)
                .flatten(0, 1)[None, None]
                for chunk in self.chunks
            ]
        return self._masks[dtype]

    def __call__(
        self,
        query_NBQH: Tensor,
        key_NBKH: Tensor,
        value_NBKH: Tensor,
        context_key_TKH: Tensor,
        context_value_TKH: Tensor,
    ) -> Tensor:
        if not self.chunks:
            return torch.zeros_like(query_NBQH)
        tensors = (query_NBQH, key_NBKH, value_NBKH, context_key_TKH, context_value_TKH)
        return _ChunkedAttention.apply(*(tensor.to(value_NBKH.dtype) for tensor in tensors), self)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        plan: ChunkedAttention,
    ) -> Tensor:
        exact = _accumulator(value.dtype)
        out = torch.empty_like(query)
        log_sum = torch.empty(query.shape[:3], dtype=exact, device=query.device)  # [N, B, Q], of the context first
        for chunk, mask in zip(plan.chunks, plan.masks(query.dtype), strict=True):
            rows = _rows(query[chunk.part], key.shape[2])
            keys, values = (_stretch(each, chunk, len(rows)) for each in (context_key, context_value))
            mixed, sums = _flash(rows, keys, values, attn_mask=mask)
            out[chunk.part] = _blocks(mixed, plan.block_size)
            log_sum[chunk.part] = _blocks(sums[..., None], plan.block_size)[..., 0]
        own = _own_scores(query, key, plan)
        total = torch.logaddexp(log_sum, own.logsumexp(dim=-1))
        weights = own.sub_(total[..., None]).exp_()
        out.mul_(torch.exp(log_sum - total)[..., None])
        out.add_(_mix(weights.to(value.dtype), value))
        ctx.save_for_backward(query, key, value, context_key, context_value, out, total)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, context_key, context_value, out, total = ctx.saved_tensors
        plan: ChunkedAttention = ctx.plan
        given, exact = grads[0].contiguous(), _accumulator(value.dtype)
        weights = _own_scores(query, key, plan).sub_(total[..., None]).exp_()
        dot = (given.to(exact) * out.to(exact)).sum(dim=-1, keepdim=True)
        towards = _against(given, value).to(exact)
        scores = (weights * towards.sub_(dot)).mul_(query.shape[-1] ** -0.5).to(query.dtype)
        grad_query = _mix(scores, key)
        grad_key, grad_value = _gather(scores, query, key), _gather(weights.to(value.dtype), given, value)
        # Many chunks add to a context position: summed in the precision of the softmax.
        grad_context_key = torch.zeros_like(context_key, dtype=exact)
        grad_context_value = torch.zeros_like(grad_context_key)
        for chunk, mask in zip(plan.chunks, plan.masks(query.dtype), strict=True):
            rows, given_rows, out_rows = (_rows(each[chunk.part], key.shape[2]) for each in (query, given, out))
            keys, values = (_stretch(each, chunk, len(rows)) for each in (context_key, context_value))
            # The kernel forms its weights from the log-sum-exp it is given: with the merged one they are ours.
            sums = _rows(total[chunk.part][..., None], key.shape[2])[..., 0].contiguous()
            to_query, to_keys, to_values = _flash_backward(
                given_rows, rows, keys, values, out_rows, sums, 0.0, False, attn_mask=mask
            )
            grad_query[chunk.part] += _blocks(to_query, plan.block_size)
            for total_grad, part in ((grad_context_key, to_keys), (grad_context_value, to_values)):
                for group in part:
                    total_grad[chunk.context] += group.transpose(0, 1)
        context_grads = (grad_context_key.to(context_key.dtype), grad_context_value.to(context_value.dtype))
        return grad_query, grad_key, grad_value, *context_grads, None


def _rows(tensor_NBQX: Tensor, num_kv_heads: int) -> Tensor:
    """Slots as the kernel's queries, [G, K, n * B, X]: the query group is its batch, so that keys are not repeated."""
    return tensor_NBQX.flatten(0, 1).unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)


def _blocks(rows: Tensor, block_size: int) -> Tensor:
    """The inverse of `_rows`: [G, K, n * B, X] as [n, B, Q, X]."""
    return rows.permute(2, 1, 0, 3).flatten(1, 2).unflatten(0, (-1, block_size))


def _stretch(tensor_TKH: Tensor, chunk: _Chunk, num_groups: int) -> Tensor:
    """A chunk's stretch of context, the same memory for each of the query group, [G, K, width, H]."""
    return tensor_TKH[chunk.context].transpose(0, 1)[None].expand(num_groups, -1, -1, -1)


def _grouped(tensor_NBQX: Tensor, num_kv_heads: int) -> Tensor:
    """[N, B, Q, X] as [N, K, G * B, X]: the query group lies in the query axis, so that keys are never repeated."""
    num_blocks, block_size, num_heads, width = tensor_NBQX.shape
    folded = tensor_NBQX.view(num_blocks, block_size, num_kv_heads, num_heads // num_kv_heads, width)
    return folded.permute(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, -1, width)


def _ungrouped(folded: Tensor, block_size: int) -> Tensor:
    num_blocks, num_kv_heads, rows, width = folded.shape
    out = folded.view(num_blocks, num_kv_heads, rows // block_size, block_size, width)
    return out.permute(0, 3, 1, 2, 4).reshape(num_blocks, block_size, -1, width)


def _against(rows_NBQH: Tensor, slots_NBKH: Tensor) -> Tensor:
    """Products of every slot's rows with every slot of its block, [N, B, Q, B]."""
    products = torch.matmul(_grouped(rows_NBQH, slots_NBKH.shape[2]), slots_NBKH.permute(0, 2, 3, 1))
    return _ungrouped(products, slots_NBKH.shape[1])


def _mix(weights_NBQC: Tensor, slots_NBKH: Tensor) -> Tensor:
    """Weighted sums of a block's slots, [N, B, Q, H]."""
    mixed = torch.matmul(_grouped(weights_NBQC, slots_NBKH.shape[2]), slots_NBKH.transpose(1, 2))
    return _ungrouped(mixed, slots_NBKH.shape[1])


def _gather(weights_NBQC: Tensor, rows_NBQH: Tensor, slots_NBKH: Tensor) -> Tensor:
    """What reaches each slot through the weights, [N, B, K, H]: the transpose of `_mix`."""
    num_kv_heads = slots_NBKH.shape[2]
    gathered = torch.matmul(_grouped(weights_NBQC, num_kv_heads).mT, _grouped(rows_NBQH, num_kv_heads))
    return gathered.transpose(1, 2)


def _own_scores(query: Tensor, key: Tensor, plan: ChunkedAttention) -> Tensor:
    """Scores of a block's slots among themselves in the softmax's precision, [N, B, Q, B]."""
    scores = _against(query, key).to(_accumulator(query.dtype)).mul_(query.shape[-1] ** -0.5)
    if plan.causal:
        scores.masked_fill_(~plan.visible_slots[:, None], -torch.inf)
    return scores


def _chunks(blocks: Blocks, block_size: int, window: int | None) -> list[_Chunk]:
    """Runs of neighboring blocks of one example."""
    starts, anchors = blocks.starts.tolist(), blocks.anchors.tolist()
    chunks: list[_Chunk] = []
    first = 0
    for index in range(1, len(starts) + 1):
        if index < len(starts) and starts[index] == starts[first] and index - first < CHUNK_BLOCKS:
            all_see = anchors[first] - starts[first]
            if anchors[index] - anchors[first] <= max(CHUNK_SPAN, CHUNK_SHARE * all_see):
                continue
        start = starts[first] if window is None else max(starts[first], anchors[first] - window + 1)
        part, context = slice(first, index), slice(start, anchors[index - 1])
        visible = context_mask(blocks[part], context.stop, block_size, window)[..., context]
        chunks.append(_Chunk(part, context, visible))
        first = index
    return chunks


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def plain_attention(
    query_NBQH: Tensor,
    key_NBKH: Tensor,
    value_NBKH: Tensor,
    context_key_TKH: Tensor,
    context_value_TKH: Tensor,
    blocks: Blocks,
    window: int | None,
    causal: bool,
) -> Tensor:
    """A `BlockAttention` by one dense mask over all T + N * B keys: the reference implementation of the others."""
    num_blocks, block_size, num_heads, head_dim = query_NBQH.shape
    groups, dtype = num_heads // key_NBKH.shape[2], value_NBKH.dtype
    query_NBQH = query_NBQH.to(dtype)
    keys = torch.cat((context_key_TKH.to(dtype), key_NBKH.to(dtype).flatten(0, 1))).repeat_interleave(groups, dim=1)
    values = torch.cat((context_value_TKH.to(dtype), value_NBKH.flatten(0, 1))).repeat_interleave(groups, dim=1)
    visible_context = context_mask(blocks, len(context_key_TKH), block_size, window)
    own = torch.eye(num_blocks, dtype=torch.bool, device=keys.device)[:, None, :, None]
    visible_slots = own & slot_mask(block_size, causal, keys.device)[None, :, None, :]
    visible = torch.cat(
        (visible_context, visible_slots.reshape(num_blocks, block_size, num_blocks * block_size)), dim=-1
    ).flatten(0, 1)
    scores = torch.einsum("mqh,tqh->qmt", query_NBQH.flatten(0, 1) * head_dim**-0.5, keys)
    scores = scores.to(_accumulator(scores.dtype))
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).to(values.dtype)
    return torch.einsum("qmt,tqh->mqh", weights, values).view_as(query_NBQH)
