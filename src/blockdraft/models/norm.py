"""RMSNorm whose weight follows the dtype of what it normalizes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * w. Training keeps w in float32 while activations may be bfloat16, as they will be when serving."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
