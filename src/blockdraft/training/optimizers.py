"""Optimizers over a draft's parameters: AdamW for all, or Muon for matrices beside AdamW for the rest.

AdamW is torch's own, and so is Muon but for the dtype it computes in. Muon orthogonalises the update of hidden
matrices (Jordan et al., 2024); norms, biases, the fusion table, token tables and single-row outputs have no such
structure and stay with AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from blockdraft.runtime import has_fast_bfloat16
from blockdraft.settings import TrainSettings
from blockdraft.training.muon import Muon
from blockdraft.training.processes import ALONE, Processes
from blockdraft.training.sharding import divided_as, whole_state


class Optimizers:
    """One or two torch optimizers that step together under one schedule."""

    def __init__(self, model: nn.Module, settings: TrainSettings, processes: Processes = ALONE) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for name, p in parameters.items() if is_hidden_matrix(name, p)]
        rest = [p for name, p in parameters.items() if not is_hidden_matrix(name, p)]
        self._members: list[torch.optim.Optimizer] = []
        decay = settings.weight_decay
        if settings.optimizer == "muon":
            dtype = torch.bfloat16 if has_fast_bfloat16(next(model.parameters()).device) else torch.float32
            self._members.append(Muon(matrices, dtype, processes, lr=settings.muon_lr, weight_decay=decay))
            self._members.append(
                torch.optim.AdamW(rest, lr=settings.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
            )
        else:
            groups = [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
            self._members.append(torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True))
        self._peaks = [[group["lr"] for group in member.param_groups] for member in self._members]

    def step(self, factor: float) -> None:
        """Update with every learning rate at `factor` of its peak, then clear the gradients."""
        for member, peaks in zip(self._members, self._peaks, strict=True):
            for group, peak in zip(member.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            member.step()
            member.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Whole tensors, also where those of the model are divided; all processes must ask together."""
        return [whole_state(member.state_dict()) for member in self._members]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up what `state_dict` gave, in a run of any number of processes."""
        for member, state in zip(self._members, states, strict=True):
            parameters = [parameter for group in member.param_groups for parameter in group["params"]]
            member.load_state_dict({**state, "state": _divided(state["state"], parameters)})


def _divided(state: dict[int, dict[str, Any]], parameters: list[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Moments, by number of their parameter, divided as it is; a count of steps is not."""
    return {
        number: {
            name: divided_as(value, parameters[number])
            if isinstance(value, torch.Tensor) and value.shape == parameters[number].shape
            else value
            for name, value in moments.items()
        }
        for number, moments in state.items()
    }


_TABLES = ("layer_fusion_weights", "markov_w1.weight", "markov_w2.weight")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix between hidden spaces (not a table of tokens or mixtures, nor a single row)."""
    return parameter.ndim == 2 and min(parameter.shape) > 1 and not name.endswith(_TABLES)
