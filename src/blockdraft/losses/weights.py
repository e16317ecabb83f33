"""How much each slot of a block counts. Weights are constants to the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def exp_decay(mask_NK: Tensor, gamma: float) -> Tensor:
    """w_i = exp(-i / gamma) for the i-th predicted slot, i = 0..K-1, zero where the mask is, [N, K].

    DFlash, appendix A.1: late slots only matter when all earlier ones are right.
    """
    slots = torch.arange(mask_NK.shape[1], device=mask_NK.device, dtype=torch.float32)
    return torch.exp(-slots / gamma) * mask_NK


def progressive_gamma(start: float, end: float, progress: float) -> float:
    """DFlare's schedule: gamma grows linearly over training, so that late slots come to count more."""
    return start + (end - start) * progress


def dpace(confidence_NK: Tensor, mask_NK: Tensor, alpha: float) -> Tensor:
    """Weights by the draft's own confidence along the block (D-PACE), [N, K].

    With the target's probability q_k and s_k = (1 - alpha) q_k + alpha, the chance of getting as far as slot k is
    C_k = prod_{i <= k} s_i, and a slot is worth what hangs on it: w_k = sum_{m >= k} C_m. Masked slots pass the
    product on unchanged and earn nothing. Defined for cross entropy only.

    Args:
        confidence_NK: probability of the verifier's token, 0 where the draft cannot say it.
    """
    s = (1 - alpha) * confidence_NK.detach() + alpha
    survival = torch.where(mask_NK, s, 1.0).cumprod(dim=1) * mask_NK
    return survival.flip(1).cumsum(1).flip(1) * mask_NK
