"""The training objective of a chunk of blocks.

One normalisation for every objective: the weighted sum of slot losses divided by the number of supervised slots of
the whole step (not by the sum of weights, and not per chunk).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from blockdraft.losses.weights import dpace, fixed_exp_decay


@dataclass(frozen=True, slots=True)
class Objective:
    """Cross entropy against the verifier's own next token, weighted by slot."""

    weighting: str  # "dpace" or "fixed-exp-decay"
    dpace_alpha: float
    decay_gamma: float

    def slot_losses(self, logits_NKV: Tensor, targets_NK: Tensor, mask_NK: Tensor) -> Tensor:
        """Weighted loss of every slot, float32 [N, K]; zero where the mask is. Differentiable."""
        flat = cross_entropy(logits_NKV.float().flatten(0, 1), targets_NK.flatten(), reduction="none")
        losses = torch.where(mask_NK, flat.view_as(targets_NK), 0.0)
        return self._weights(losses, mask_NK) * losses

    @torch.no_grad()
    def slot_losses_and_gradient(
        self, logits_NKV: Tensor, targets_NK: Tensor, mask_NK: Tensor, scale: Tensor
    ) -> SlotLosses:
        """`slot_losses` times `scale`, and the gradient of their sum by the logits: scale * w_k (softmax - onehot).

        Autograd would keep three more copies of the logits; here one float32 buffer is turned in place from logits
        into log-probabilities into the gradient.
        """
        buffer = logits_NKV.float().log_softmax(dim=-1)
        at_target = buffer.gather(2, targets_NK[..., None])
        losses = torch.where(mask_NK, -at_target[..., 0], 0.0)
        predicted = buffer.argmax(dim=-1)
        weights = self._weights(losses, mask_NK) * scale
        gradient = buffer.exp_().mul_(weights[..., None])
        gradient.scatter_add_(2, targets_NK[..., None], -weights[..., None])
        return SlotLosses(weights * losses, gradient, predicted)

    def _weights(self, losses_NK: Tensor, mask_NK: Tensor) -> Tensor:
        if self.weighting == "dpace":
            return dpace(losses_NK, mask_NK, self.dpace_alpha)
        return fixed_exp_decay(mask_NK, self.decay_gamma)


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Weighted losses [N, K], their sum's gradient by the logits [N, K, V], and the likeliest tokens [N, K]."""

    losses: Tensor
    gradient: Tensor
    predicted: Tensor


@dataclass(frozen=True, slots=True)
class BlockMetrics:
    """Counts over the supervised slots of a step; all figures are derived from them.

    Attributes:
        slots: supervised slots by position in the block, int64 [K].
        correct: slots whose likeliest token is the target, int64 [K].
        accepted: sum over blocks of the leading run of correct slots.
        blocks: blocks with at least one supervised slot.
    """

    slots: Tensor
    correct: Tensor
    accepted: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, predicted_NK: Tensor, targets_NK: Tensor, mask_NK: Tensor) -> BlockMetrics:
        correct = (predicted_NK == targets_NK) & mask_NK
        return cls(mask_NK.sum(0), correct.sum(0), correct.long().cumprod(1).sum(), mask_NK.any(1).sum())

    def __add__(self, other: BlockMetrics) -> BlockMetrics:
        return BlockMetrics(
            self.slots + other.slots,
            self.correct + other.correct,
            self.accepted + other.accepted,
            self.blocks + other.blocks,
        )

    def figures(self) -> dict[str, float]:
        """accuracy over all slots and by position, and the mean run of right slots plus the bonus token."""
        accuracy = (self.correct / self.slots.clamp_min(1)).tolist()
        return {
            "accuracy": float(self.correct.sum() / self.slots.sum().clamp_min(1)),
            "block_length": 1 + float(self.accepted / self.blocks.clamp_min(1)),
            **{f"accuracy_position_{k}": value for k, value in enumerate(accuracy, start=1)},
        }
