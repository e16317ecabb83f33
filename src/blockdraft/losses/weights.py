"""How much each slot of a block counts. Weights are constants to the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed_exp_decay(mask_NK: Tensor, gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for predicted slots k = 1..K, zero where the mask is, [N, K].

    DFlash, appendix A.1: late slots only matter when all earlier ones are right.
    """
    slots = torch.arange(mask_NK.shape[1], device=mask_NK.device, dtype=torch.float32)
    return torch.exp(-slots / gamma) * mask_NK


def dpace(cross_entropy_NK: Tensor, mask_NK: Tensor, alpha: float) -> Tensor:
    """Weights by the draft's own confidence along the block (D-PACE), [N, K].

    With q_k = exp(-CE_k) and s_k = (1 - alpha) q_k + alpha, the chance of getting as far as slot k is
    C_k = prod_{i <= k} s_i, and a slot is worth what hangs on it: w_k = sum_{m >= k} C_m. Masked slots pass the
    product on unchanged and earn nothing. Defined for cross entropy only, since q is the target's probability.
    """
    mask = mask_NK.float()
    confidence = torch.exp(-cross_entropy_NK.detach().float())
    survival = torch.where(mask_NK.bool(), (1 - alpha) * confidence + alpha, 1.0).cumprod(dim=1) * mask
    return survival.flip(1).cumsum(1).flip(1) * mask
