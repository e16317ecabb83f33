"""Head and loss in chunks of blocks, so that [slots, vocabulary] logits never exist whole.

The head is frozen: all that is needed back is the gradient of the hidden states. It is computed in the forward pass,
chunk by chunk, while the chunk's logits are at hand: two products with the head in place of the three of
recomputation, and memory that grows with the chunk. Blocks are never cut, since a slot's weight may depend on its
whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.losses.objective import BlockMetrics, Objective
from blockdraft.ops.head import head_logits

# Float32 logits of a chunk, in bytes. Under glibc's largest mmap threshold (32 MiB) the allocator reuses its pages;
# above it every temporary is mapped and faulted in anew, which doubled the time of the softmax on processors.
CHUNK_BYTES = 24 * 2**20
SMALLEST_CHUNK = 64  # slots; fewer would read the head's weights too often for the work done with them


def chunk_slots(vocab_size: int) -> int:
    """Slots whose logits exist at once."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocab_size))


@dataclass(frozen=True, slots=True)
class LossAndMetrics:
    """`loss` is differentiable in the hidden states."""

    loss: Tensor
    metrics: BlockMetrics


class _ChunkedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NKD: Tensor,
        head_VD: Tensor,
        targets_NK: Tensor,
        mask_NK: Tensor,
        objective: Objective,
        chunk_blocks: int,
    ) -> tuple[Tensor, Tensor]:
        scale = 1 / mask_NK.sum().clamp_min(1)
        total = torch.zeros((), device=hidden_NKD.device)
        gradient = torch.empty_like(hidden_NKD)
        predicted = torch.empty_like(targets_NK)
        for first in range(0, len(hidden_NKD), chunk_blocks):
            part = slice(first, first + chunk_blocks)
            logits = head_logits(hidden_NKD[part], head_VD)
            slots = objective.slot_losses_and_gradient(logits, targets_NK[part], mask_NK[part], scale)
            predicted[part] = slots.predicted
            total += slots.losses.sum()
            gradient[part] = torch.matmul(slots.gradient.to(head_VD.dtype), head_VD)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(predicted)
        return total, predicted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None


def chunked_head_loss(
    hidden_NKD: Tensor,
    head_VD: Tensor,
    targets_NK: Tensor,
    mask_NK: Tensor,
    objective: Objective,
) -> LossAndMetrics:
    """Loss of predicted slots through a frozen head.

    Args:
        hidden_NKD: hidden states of the predicted slots, after the draft's final norm.
        head_VD: the verifier's output head; the product runs in its dtype.
        targets_NK: the verifier's own token for every slot; anything where the mask is False.
        mask_NK: supervised slots.
    """
    # A block without supervision is not projected at all.
    live = mask_NK.any(dim=1)
    if not bool(live.all()):
        hidden_NKD, targets_NK, mask_NK = hidden_NKD[live], targets_NK[live], mask_NK[live]
    chunk_blocks = max(1, chunk_slots(len(head_VD)) // max(1, targets_NK.shape[1]))
    hidden_NKD = hidden_NKD.to(head_VD.dtype)
    loss, predicted = _ChunkedHeadLoss.apply(hidden_NKD, head_VD, targets_NK, mask_NK, objective, chunk_blocks)
    return LossAndMetrics(loss, BlockMetrics.of(predicted, targets_NK, mask_NK))


def plain_head_loss(
    hidden_NKD: Tensor, head_VD: Tensor, targets_NK: Tensor, mask_NK: Tensor, objective: Objective
) -> LossAndMetrics:
    """`chunked_head_loss` by whole logits and autograd; the twin for tests."""
    logits = head_logits(hidden_NKD, head_VD)
    losses = objective.slot_losses(logits, targets_NK, mask_NK)
    metrics = BlockMetrics.of(logits.argmax(dim=-1), targets_NK, mask_NK)
    return LossAndMetrics(losses.sum() / mask_NK.sum().clamp_min(1), metrics)
