"""The training objective: which losses, how slots are weighted, and the confidence term.

One normalization for every objective: the weighted sum of slot losses divided by the number of supervised slots of
the whole step (not by the sum of weights, and not per chunk).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from blockdraft.errors import InputError
from blockdraft.files import reason
from blockdraft.losses.pointwise import LOSSES
from blockdraft.losses.targets import SlotTargets
from blockdraft.losses.weights import dpace, exp_decay, progressive_gamma

SPELLINGS = MappingProxyType({"kl_div": "kl", "reverse_kl": "rkl"})  # as others call them


def parse_loss(text: str) -> dict[str, float]:
    """A loss's name, or a JSON object of names and weights such as {"ce": 0.1, "tv": 0.9}.

    Raises:
        InputError: another shape, an unknown name or a weight that is not above 0.
    """
    raw: object = {text: 1.0}
    if text.lstrip().startswith("{"):
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError("--loss-fn", text, f"not valid JSON ({reason(error)})") from None
    assert isinstance(raw, dict)
    terms: dict[str, float] = {}
    for name, weight in raw.items():
        known = SPELLINGS.get(name, name)
        if known not in LOSSES:
            raise InputError("--loss-fn", name, f"known losses are {', '.join(LOSSES)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InputError("--loss-fn", f"{name}: {weight}", "a weight must be a number above 0")
        terms[known] = float(weight)
    if not terms:
        raise InputError("--loss-fn", text, f"name at least one of {', '.join(LOSSES)}")
    return terms


@dataclass(frozen=True, slots=True)
class Objective:
    """What a step minimises.

    Attributes:
        terms: losses and their weights.
        weighting: a `choices.Weighting`.
        confidence_alpha: weight of the confidence head's term.
        progress: share of training done, for weights that change with it.
    """

    terms: dict[str, float]
    weighting: str
    dpace_alpha: float = 0.5
    decay_gamma: float = 4.0
    decay_gamma_end: float = 4.0
    confidence_alpha: float = 1.0
    progress: float = 0.0

    def __post_init__(self) -> None:
        if self.weighting == "dpace" and set(self.terms) != {"ce"}:
            raise InputError(
                "--per-position-loss-weight", "dpace", "is defined for --loss-fn ce alone; take fixed-exp-decay"
            )

    @property
    def needs_teacher(self) -> bool:
        """Whether the verifier's distributions are needed, and not only its tokens."""
        return set(self.terms) != {"ce"}

    def at(self, progress: float) -> Objective:
        """The objective when this share of the training is done."""
        return dataclasses.replace(self, progress=progress)

    @property
    def gamma(self) -> float:
        if self.weighting == "progressive-decay":
            return progressive_gamma(self.decay_gamma, self.decay_gamma_end, self.progress)
        return self.decay_gamma

    def weights(self, confidence_NK: Tensor, targets: SlotTargets) -> Tensor:
        """Weight of every slot, float32 [N, K]; zero where there is nothing to learn.

        Args:
            confidence_NK: the draft's probability of the verifier's token; 0 where it cannot say it.
        """
        if self.weighting == "dpace":
            return dpace(confidence_NK, targets.mask_NK, self.dpace_alpha) * targets.in_vocabulary_NK
        return exp_decay(targets.in_vocabulary_NK, self.gamma)

    def confidence_loss(self, logits_NK: Tensor, overlap_NK: Tensor, targets: SlotTargets) -> Tensor:
        """Binary cross entropy of the confidence head towards the overlap of draft and verifier (DSpark), a scalar.

        The overlap is a constant here. Weights fall with the fixed gamma even under D-PACE, whose weights would be
        made of the confidence itself.
        """
        losses = binary_cross_entropy_with_logits(logits_NK.float(), overlap_NK.detach().float(), reduction="none")
        weights = exp_decay(targets.mask_NK, self.gamma)
        return self.confidence_alpha * (weights * losses).sum() * targets.scale()
