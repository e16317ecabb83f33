"""What a slot may see, as dense masks. The plain statement of the rule; nothing on a hot path builds these."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.ops.anchors import Blocks


def context_mask(blocks: Blocks, row_length: int, window: int | None) -> Tensor:
    """Which context positions each block sees, bool [N, T].

    Strictly before the anchor (the anchor's own verifier state does not exist yet when serving), inside the anchor's
    document, and with a sliding window the last `window` of those, measured from the anchor for all slots.
    """
    positions = torch.arange(row_length, device=blocks.anchors.device)
    anchors = blocks.anchors[:, None]
    seen = (positions >= blocks.starts[:, None]) & (positions < anchors)
    return seen if window is None else seen & (positions >= anchors - window)


def slot_mask(block_size: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """Which slots of its own block a slot sees, bool [B, B]: all of them, or those up to itself."""
    full = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    return full.tril() if causal else full
