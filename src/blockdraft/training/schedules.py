"""Learning-rate schedules, as factors of the peak rate."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, total_steps: int, warmup_ratio: float, kind: str) -> float:
    """Factor for the update after `step` finished ones.

    The rate rises linearly over the warm-up (the first update already moves) and then follows `kind`: "cosine" and
    "linear" fall towards zero at `total_steps`, "constant" stays.
    """
    warmup = round(total_steps * warmup_ratio)
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    done = (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done
