"""Muon whose orthogonalisation runs in a dtype that the device has, once for all processes of a run.

torch's own rounds to bfloat16 before the Newton-Schulz iteration. On a device without native bfloat16 its products
are emulated, and take nearly all of a step's time. State and arguments are torch's, so that checkpoints of either load.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from blockdraft.training.processes import ALONE, Processes, whole
from blockdraft.training.sharding import divided_as


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
    """torch.optim.Muon, orthogonalising in `dtype`.

    Of several processes each orthogonalises its share of the matrices. A divided matrix is gathered for that, and only
    the update of it: its momentum stays divided.
    """

    def __init__(self, params: Any, dtype: torch.dtype, processes: Processes = ALONE, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        self._dtype, self._processes = dtype, processes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with Nesterov momentum; the learning rate grows with the root of height over width (tall only)."""
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] is None
            orthogonalise = functools.partial(
                orthogonalised, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"],
                dtype=self._dtype,
            )  # fmt: skip
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            # As many matrices at a time as there are processes: no more updates than that are whole at once.
            for start in range(0, len(moving), self._processes.count):
                parameters = moving[start : start + self._processes.count]
                updates = [whole(self._update(parameter, group["momentum"])) for parameter in parameters]
                done = self._processes.in_turns(updates, orthogonalise)
                for parameter, update in zip(parameters, done, strict=True):
                    rate = group["lr"] * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(divided_as(update.to(parameter.dtype), parameter), alpha=-rate)

    def _update(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the gradient moved towards its average, which is kept."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)
