"""What a device rejects, and that the checks here fail when tensors are left on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from blockdraft.ops.anchors import Blocks
from devices.stage import Check
from devices.training import same_step

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _mixing(device: str, _folder: Path) -> None:
    here, there = torch.randn(4, 4), torch.randn(4, 4, device=device)
    index = torch.tensor([0, 2])
    _require_error(lambda: here + there)
    _require_error(lambda: here @ there)
    _require_error(lambda: torch.cat([here, there]))
    _require_error(lambda: torch.where(here > 0, there, 0))
    _require_error(lambda: here[index.to(device)])
    _require_error(lambda: torch.nn.functional.embedding(index, there))
    heads = torch.randn(1, 1, 4, 8, device=device)
    _require_error(lambda: _flash(heads, heads, heads))
    # What a real accelerator allows: numbers without dimensions, and indices on the CPU.
    assert there[index].device == there.device and (there * torch.tensor(2.0)).device == there.device


def _left_on_the_cpu(device: str, folder: Path) -> None:
    """The fault that every step had: blocks that nobody moves."""
    with mock.patch.object(Blocks, "to", lambda self, _: self):
        _require_error(partial(same_step, device, folder))


def _require_error(action: Callable[[], object]) -> None:
    try:
        action()
    except (RuntimeError, NotImplementedError):
        return
    raise AssertionError("tensors of two devices met, and nothing was said")


CHECKS = (
    Check("tensors of two devices do not meet", _mixing),
    Check("a step whose blocks stay on the CPU fails", _left_on_the_cpu),
)
