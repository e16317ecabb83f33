"""Counts of a training step, from which every figure is derived."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.losses.targets import SlotTargets


@dataclass(frozen=True, slots=True)
class BlockMetrics:
    """Counts over the supervised slots of a step, in the verifier's full vocabulary.

    Attributes:
        slots: supervised slots by position in the block, int64 [K].
        covered: those whose target the draft can say, int64 [K].
        correct: slots whose most likely token is the target, int64 [K].
        accepted: sum over blocks of the leading run of correct slots.
        blocks: blocks with at least one supervised slot.
        overlap, confidence_error: sums over slots of what the confidence head should say, and of how far off it is;
            None without such a head.
    """

    slots: Tensor
    covered: Tensor
    correct: Tensor
    accepted: Tensor
    blocks: Tensor
    overlap: Tensor | None = None
    confidence_error: Tensor | None = None

    @classmethod
    def of(cls, predicted_NK: Tensor, targets: SlotTargets) -> BlockMetrics:
        """Count; a slot whose target the draft cannot say is wrong."""
        mask = targets.mask_NK
        correct = (predicted_NK == targets.ids_NK) & targets.in_vocabulary_NK
        return cls(
            mask.sum(0),
            targets.in_vocabulary_NK.sum(0),
            correct.sum(0),
            correct.long().cumprod(1).sum(),
            mask.any(1).sum(),
        )

    @classmethod
    def none(cls, k: int, with_confidence: bool) -> BlockMetrics:
        """Those of no slot."""
        counts, number = torch.zeros(k, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        sums = torch.zeros(()) if with_confidence else None
        return cls(counts, counts, counts, number, number, sums, sums)

    def to(self, device: torch.device) -> BlockMetrics:
        """These counts on a device."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: tensor.to(device) for name, tensor in found.items() if tensor is not None})

    def with_confidence(self, confidence_NK: Tensor, overlap_NK: Tensor, mask_NK: Tensor) -> BlockMetrics:
        """These counts and how well the confidence head (probabilities) knows the overlap."""
        error = (confidence_NK.detach() - overlap_NK).abs()
        return replace(self, overlap=(overlap_NK * mask_NK).sum(), confidence_error=(error * mask_NK).sum())

    def __add__(self, other: BlockMetrics) -> BlockMetrics:
        return BlockMetrics(**{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})

    def figures(self) -> dict[str, float]:
        """Accuracy over all slots and by position, and the mean run of right slots plus the bonus token.

        With a reduced vocabulary also its coverage, and the accuracy where the target can be said.
        """
        accuracy = (self.correct / self.slots.clamp_min(1)).tolist()
        slots, covered, correct = int(self.slots.sum()), int(self.covered.sum()), int(self.correct.sum())
        figures = {
            "accuracy": correct / max(slots, 1),
            "block_length": 1 + float(self.accepted / self.blocks.clamp_min(1)),
            **{f"accuracy_position_{k}": value for k, value in enumerate(accuracy, start=1)},
        }
        if covered < slots:
            figures["coverage"] = covered / slots
            figures["accuracy_in_draft_vocabulary"] = correct / max(covered, 1)
        if self.overlap is not None and self.confidence_error is not None:
            figures["overlap"] = float(self.overlap) / max(slots, 1)
            figures["confidence_abs_error"] = float(self.confidence_error) / max(slots, 1)
        return figures


def _sum(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b
