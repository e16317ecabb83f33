"""Context fusion: from the verifier's taps at a position to what each draft layer reads there.

`projected` is DFlash's: all taps side by side through one linear layer, the same context for every draft layer.
`layerwise` is DFlare's: every draft layer mixes the taps with its own softmax weights. Both end in one RMSNorm.

Raw taps can be nearly constant: a large common mean, a few channels with most of the energy, outliers at the first
positions. A draft that reads them raw may learn token frequencies only. Standardisation
removes each tap's mean direction and divides each channel by its spread. Both are linear and without bias, so that
`projected` fusion can carry them inside its projection, exactly: W' = (W / scale)(I - u u^T).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blockdraft.draft_config import DraftConfig
from blockdraft.models.norm import RMSNorm


class TapStatistics(nn.Module):
    """Mean direction u and channel scale s of each tap: standardized = (tap - (tap . u) u) / s.

    Buffers, not parameters: measured once on the training data (`calibrate`), then fixed.
    """

    direction: Tensor  # [L, E], unit norm, or zero where nothing is removed
    scale: Tensor  # [L, E]

    def __init__(self, num_taps: int, verifier_size: int) -> None:
        super().__init__()
        self.register_buffer("direction", torch.zeros(num_taps, verifier_size))
        self.register_buffer("scale", torch.ones(num_taps, verifier_size))

    @torch.no_grad()
    def calibrate(self, taps_TLE: Tensor) -> None:
        """Measure on states of real text. Attention sinks (first positions, outliers) should not be among them."""
        taps = taps_TLE.float()
        mean = taps.mean(dim=0)
        self.direction.copy_(mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12))
        centred = self._without_direction(taps)
        spread = centred.square().mean(dim=0).sqrt()
        # A channel that hardly moves would be blown up to pure noise, so spreads are floored at a tenth of the median.
        self.scale.copy_(torch.maximum(spread, 0.1 * spread.median(dim=-1, keepdim=True).values).clamp_min(1e-6))

    def _without_direction(self, taps: Tensor) -> Tensor:
        along = (taps * self.direction).sum(dim=-1, keepdim=True)
        return taps - along * self.direction

    def forward(self, taps: Tensor) -> Tensor:
        """Standardise taps [..., L, E]; computed in float32, since the mean that cancels is large."""
        return (self._without_direction(taps.float()) / self.scale).to(taps.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        """The projection [D, L * E] that does to raw taps what `weight` does to standardized ones."""
        scaled = weight.view(len(weight), *self.scale.shape) / self.scale
        along = (scaled * self.direction).sum(dim=-1, keepdim=True)
        return (scaled - along * self.direction).view_as(weight)


class ProjectedFusion(nn.Module):
    """Concatenated taps -> linear without bias -> RMSNorm; one context for all draft layers."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.statistics = (
            TapStatistics(len(config.target_layer_ids), config.hidden_size) if config.standardize_taps else None
        )
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, taps: Tensor) -> Tensor:
        """Taps [..., L, E] -> context [..., 1, D]. Training multiplies by the folded weight, as serving will."""
        weight = self.fc.weight if self.statistics is None else self.statistics.fold(self.fc.weight)
        fused = linear(taps.flatten(-2), weight.to(taps.dtype))
        return self.hidden_norm(fused).unsqueeze(-2)


class LayerwiseFusion(nn.Module):
    """Softmax-weighted sum of taps for each draft layer -> one shared RMSNorm (DFlare)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        num_taps = len(config.target_layer_ids)
        self.statistics = TapStatistics(num_taps, config.hidden_size) if config.standardize_taps else None
        # Layer d leans towards the tap at the same relative depth, as the published DFlare code starts.
        weights = torch.zeros(config.num_layers, num_taps)
        for layer in range(config.num_layers):
            weights[layer, min(num_taps - 1, layer * num_taps // config.num_layers)] = 2.0
        self.layer_fusion_weights = nn.Parameter(weights)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, taps: Tensor) -> Tensor:
        """Taps [..., L, E] -> one context a draft layer [..., Y, D]."""
        if self.statistics is not None:
            taps = self.statistics(taps)
        mixture = self.layer_fusion_weights.float().softmax(dim=-1).to(taps.dtype)
        return self.hidden_norm(torch.einsum("...le,yl->...ye", taps, mixture))


CONTEXT_FUSION: dict[str, type[ProjectedFusion] | type[LayerwiseFusion]] = {
    "projected": ProjectedFusion,
    "layerwise": LayerwiseFusion,
}
