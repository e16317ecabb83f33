"""Muon against torch's own: the same bits in bfloat16, and the same direction where it computes in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdraft.training.muon import Muon, orthogonalised

SHAPES = [(3, 7), (7, 3), (16, 16), (1, 5), (48, 20)]


def descend(make: Any) -> tuple[list[torch.Tensor], list[dict]]:
    """Four steps on fixed gradients, with one parameter left without a gradient in one of them."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    optimizer = make(parameters)
    for step in range(4):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step, index) == (2, 1) else gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters], [optimizer.state[p] for p in parameters]


def test_in_bfloat16_it_is_torchs_own() -> None:
    ours, state = descend(lambda p: Muon(p, torch.bfloat16, lr=0.02, weight_decay=0.1))
    wanted, wanted_state = descend(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1))
    for got, right in zip(ours, wanted, strict=True):
        assert torch.equal(got, right)
    for got, right in zip(state, wanted_state, strict=True):
        assert got.keys() == right.keys() and torch.equal(got["momentum_buffer"], right["momentum_buffer"])


def test_in_float32_it_goes_the_same_way() -> None:
    ours, _ = descend(lambda p: Muon(p, torch.float32, lr=0.02, weight_decay=0.1))
    wanted, _ = descend(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1))
    for got, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0.02 * 4 * 0.05)


@pytest.mark.parametrize("shape", [(6, 30), (30, 6)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalised(update, (3.4445, -4.7750, 2.0315), 5, 1e-7, torch.float32)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
