"""The start that token sequences have in common, worth running once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORTHWHILE = 32  # a shorter common start is not worth the extra pass


def shared_prefix(sequences: Sequence[Tensor]) -> int:
    """Tokens that all sequences start with; 0 when there are fewer than two sequences or it is not worthwhile.

    At most one token less than the shortest sequence has, so that every sequence keeps something of its own.
    """
    if len(sequences) < 2:
        return 0
    length = min(len(sequence) for sequence in sequences) - 1
    same = torch.stack([sequence[:length] for sequence in sequences])
    shared = int((same == same[0]).all(dim=0).long().cumprod(dim=0).sum())
    return shared if shared >= WORTHWHILE else 0
