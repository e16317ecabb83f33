"""Rotary position embedding, half-rotation ("neox") layout, as Qwen3, vLLM and the Speculators format use it."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [..., heads, H] by the angles whose cosine and sine are [..., H].

    Su et al., "RoFormer" (2021), equation 34, with the two halves of a head as real and imaginary parts.
    """
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return x * cos.unsqueeze(-2).to(x.dtype) + turned * sin.unsqueeze(-2).to(x.dtype)
