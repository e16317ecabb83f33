"""The product with an output head."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def head_logits(hidden: Tensor, head_VE: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., E], in the head's dtype.

    Rows are laid out flat first. Given a slice of blocks (strided in two dimensions) `linear` falls back to a batched
    product with a copy of the head for every block, many times slower.
    """
    flat = hidden.to(head_VE.dtype).reshape(-1, hidden.shape[-1])
    return linear(flat, head_VE).view(*hidden.shape[:-1], len(head_VE))
