"""Muon whose orthogonalisation runs in a dtype that the device has.

torch's own rounds to bfloat16 before the Newton-Schulz iteration. On a device without native bfloat16 its products
are emulated, and take nearly all of a step's time. State and arguments are torch's, so that checkpoints of either load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def orthogonalised(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of a matrix, by a quintic Newton-Schulz iteration.

    Jordan et al., "Muon" (2024): X <- a X + (b X X^T + c (X X^T)^2) X from X = update / |update|, on the wide side.
    """
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    x = (update.T if tall else update).to(dtype)
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon, orthogonalising in `dtype`."""

    def __init__(self, params: Any, dtype: torch.dtype, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with Nesterov momentum; the learning rate grows with the root of height over width (tall only)."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] is None
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(average, group["momentum"])
                settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
                update = orthogonalised(update, *settings, self._dtype)
                rate = group["lr"] * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-rate)
