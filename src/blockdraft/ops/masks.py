"""What is visible to a slot, as dense masks. The plain statement of the rule; nothing on a hot path builds these."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.ops.anchors import Blocks


def context_mask(blocks: Blocks, row_length: int, block_size: int, window: int | None) -> Tensor:
    """Which context positions are visible to each slot, bool [N, B, T].

    Strictly before the anchor (the anchor's own verifier state does not exist yet when serving) and inside the anchor's
    example. With a sliding window a slot at position p sees nothing at or before p - window: the window moves with the
    slot, as it does in the attention of serving engines. (Speculators measures it from the anchor while training.)
    """
    positions = torch.arange(row_length, device=blocks.anchors.device)
    anchors = blocks.anchors[:, None]
    visible = ((positions >= blocks.starts[:, None]) & (positions < anchors))[:, None].expand(-1, block_size, -1)
    if window is None:
        return visible
    slots = anchors + torch.arange(block_size, device=anchors.device)
    return visible & (positions > (slots - window)[..., None])


def slot_mask(block_size: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """Which slots of its own block are visible to a slot, bool [B, B]: all of them, or those up to itself."""
    full = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    return full.tril() if causal else full
