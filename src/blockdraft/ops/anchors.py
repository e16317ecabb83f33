"""Choosing anchors in a packed row, and the blocks they start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchored blocks of one packed row, sorted by anchor.

    Attributes:
        anchors: index of each anchor in the row, int64 [N], ascending.
        starts: index at which the anchor's example starts, int64 [N]; context reaches back to it and no further.
        ends: index one behind the run of supervised tokens that the anchor stands in, int64 [N]; slots at or behind it
            have nothing to learn: what follows a reply is the template's, not the verifier's.
    """

    anchors: Tensor
    starts: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return len(self.anchors)

    def __getitem__(self, part: slice) -> Blocks:
        return Blocks(self.anchors[part], self.starts[part], self.ends[part])

    def to(self, device: torch.device) -> Blocks:
        """These blocks with their tensors on a device."""
        return Blocks(self.anchors.to(device), self.starts.to(device), self.ends.to(device))


def example_bounds(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end of each example of a packed row, from the examples' lengths."""
    ends = lengths.cumsum(0)
    return ends - lengths, ends


def supervised_ends(loss_mask_T: Tensor, example_ends: Tensor) -> Tensor:
    """One behind the run of supervised tokens that each position stands in, int64 [T]; its own index outside of one."""
    if not len(loss_mask_T):
        return torch.empty(0, dtype=torch.int64, device=loss_mask_T.device)
    index = torch.arange(len(loss_mask_T), device=loss_mask_T.device)
    stops = ~loss_mask_T
    last_of_example = torch.zeros_like(stops)
    last_of_example[example_ends - 1] = True
    # The next place at which a run ends: an unsupervised position, or behind the last one of an example.
    ends = torch.where(stops, index, torch.where(last_of_example, index + 1, len(index)))
    return ends.flip(0).cummin(0).values.flip(0)


def anchor_candidates(loss_mask_T: Tensor, example_T: Tensor) -> Tensor:
    """Positions that may be an anchor: supervised, with a supervised successor in the same example."""
    follows = loss_mask_T[1:] & (example_T[1:] == example_T[:-1])
    return (loss_mask_T[:-1] & follows).nonzero()[:, 0]


def choose_anchors(
    loss_mask_T: Tensor,
    lengths: Tensor,
    max_anchors: int,
    generator: torch.Generator | None = None,
) -> Blocks:
    """Draw anchors without replacement; every example gets its share.

    The cap is split over the examples in proportion to their candidates, but no example with a candidate goes
    without (short examples starve when one cap is drawn over the packed row). When there are more such examples
    than anchors, those with most candidates come first.

    Args:
        loss_mask_T: True on supervised tokens, [T].
        lengths: lengths of the examples in the row.
        max_anchors: most anchors of the row; 0 takes every candidate.
    """
    starts, ends = example_bounds(lengths)
    example_T = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    candidates = anchor_candidates(loss_mask_T, example_T)
    if max_anchors and len(candidates) > max_anchors:
        shares = _shares(example_T[candidates].bincount(minlength=len(lengths)), max_anchors)
        order = torch.randperm(len(candidates), generator=generator, device=generator.device if generator else None)
        shuffled = candidates[order.to(candidates.device)]
        examples = example_T[shuffled]
        # Rank of each candidate within its example, in shuffled order: the first `share` of an example are taken.
        by_example = examples.argsort(stable=True)
        counts = examples.bincount(minlength=len(lengths))
        rank = torch.empty_like(by_example)
        first = counts.cumsum(0) - counts
        rank[by_example] = torch.arange(len(by_example), device=rank.device) - first[examples[by_example]]
        candidates = shuffled[rank < shares[examples]].sort().values
    return Blocks(candidates, starts[example_T[candidates]], supervised_ends(loss_mask_T, ends)[candidates])


def _shares(counts: Tensor, cap: int) -> Tensor:
    """Split `cap` over examples with `counts` candidates each: one each, the rest in proportion."""
    present = counts > 0
    if int(present.sum()) >= cap:
        shares = torch.zeros_like(counts)
        shares[counts.argsort(descending=True, stable=True)[:cap]] = 1
        return shares
    shares = present.long()
    room = counts - shares
    extra = (cap - int(shares.sum())) * room / room.sum()
    shares = shares + extra.floor().long()
    # Largest remainder; `extra <= room` always, as the cap is under the number of candidates.
    left = cap - int(shares.sum())
    order = (extra - extra.floor()).argsort(descending=True, stable=True)
    shares[order[:left]] += 1
    return torch.minimum(shares, counts)
