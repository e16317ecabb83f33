"""Cosine and sine of rotary positions, scaling variants included.

The angles come from transformers' own Qwen3 rotary module, so that every rope type it knows (yarn, llama3, linear,
...) means here what it means there and in vLLM. A draft always rotates whole heads: a verifier's partial factor is
not inherited.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from blockdraft.draft_config import DraftConfig

_GROWTH = 1024


class RotaryPositions(nn.Module):
    """Table of angles that grows with the largest position seen."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self._config = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self._table: tuple[Tensor, Tensor] | None = None

    def usable(self) -> bool:
        """Whether the parameters give angles that are numbers; whatever a rotary type raises over them is raised."""
        rotary = Qwen3RotaryEmbedding(self._config)
        cos, sin = rotary(torch.zeros(1), torch.ones(1, 1, dtype=torch.int64))
        angles = rotary.get_buffer("inv_freq")
        return bool((angles > 0).all()) and all(bool(part.isfinite().all()) for part in (angles, cos, sin))

    def forward(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """float32 (cos, sin) of integer positions [...] below `length`, each [..., H]."""
        table = self._table
        if table is None or len(table[0]) < length or table[0].device != positions.device:
            rounded = (length + _GROWTH - 1) // _GROWTH * _GROWTH
            rotary = Qwen3RotaryEmbedding(self._config).to(positions.device)
            every = torch.arange(rounded, device=positions.device)[None]
            cos, sin = rotary(torch.zeros(1, device=positions.device), every)
            table = self._table = (cos[0], sin[0])
        return table[0][positions], table[1][positions]
