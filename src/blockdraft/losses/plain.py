"""The losses again, by whole logits and autograd: reference implementations that tests and benchmarks hold the fast path against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockdraft.losses.chunked import Correction, LossAndMetrics, projected_slots
from blockdraft.losses.metrics import BlockMetrics
from blockdraft.losses.objective import Objective
from blockdraft.losses.pointwise import LK_ETA, SMALLEST_OVERLAP
from blockdraft.losses.targets import SlotTargets, Teacher
from blockdraft.ops.head import head_logits


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(dim=-1)


def _overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    return torch.minimum(log_q.exp(), log_p.exp()).sum(dim=-1)


def _jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    middle = torch.logaddexp(log_q, log_p) - torch.log(torch.tensor(2.0, dtype=log_q.dtype))
    return 0.5 * _kl(log_p, middle) + 0.5 * _kl(log_q, middle)


def _lk_hybrid(log_q: Tensor, log_p: Tensor) -> Tensor:
    overlap = _overlap(log_q, log_p)
    mix = torch.exp(-LK_ETA * overlap.detach())
    return mix * _kl(log_p, log_q) + (1 - mix) * (1 - overlap)


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": lambda log_q, log_p: _kl(log_p, log_q),
    "rkl": _kl,
    "jsd": _jsd,
    "tv": lambda log_q, log_p: 1 - _overlap(log_q, log_p),
    "nla": lambda log_q, log_p: -_overlap(log_q, log_p).clamp_min(SMALLEST_OVERLAP).log(),
    "lk_hybrid": _lk_hybrid,
}


def _accepted(log_q: Tensor, log_p: Tensor, teacher: Teacher) -> Tensor:
    """The overlap with the verifier's distribution over all of its vocabulary."""
    if teacher.whole_head_VE is None:
        return _overlap(log_q, log_p)
    states = teacher.final_TE[teacher.positions_NK]
    own, whole = (
        teacher.logits(states @ head.T).logsumexp(dim=-1, keepdim=True)
        for head in (teacher.head_VE, teacher.whole_head_VE)
    )
    return _overlap(log_q, log_p + own - whole)


def plain_head_loss(
    hidden_NKD: Tensor,
    head_VD: Tensor,
    targets: SlotTargets,
    objective: Objective,
    correction: Correction | None = None,
    with_overlap: bool = True,
) -> LossAndMetrics:
    """`chunked_head_loss` without chunks and with autograd's gradients; the overlap is always made."""
    logits = head_logits(hidden_NKD, head_VD)
    if correction is not None:
        logits = logits + correction.features_NKR @ correction.weight_VR.T
    log_q = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
    at_target = log_q.gather(2, targets.ids_NK[..., None])[..., 0]
    overlap = at_target.exp()
    losses = -objective.terms.get("ce", 0.0) * at_target
    if objective.needs_teacher:
        assert targets.teacher is not None
        log_p = targets.teacher.logits(targets.teacher.raw_logits(targets.teacher.positions_NK)).log_softmax(dim=-1)
        for name, weight in objective.terms.items():
            if name != "ce":
                losses = losses + weight * _DIVERGENCES[name](log_q, log_p)
        overlap = _accepted(log_q, log_p, targets.teacher)
    in_vocabulary = targets.in_vocabulary_NK
    losses = torch.where(in_vocabulary, losses, 0.0)
    weights = objective.weights(torch.where(in_vocabulary, at_target.detach().exp(), 0.0), targets)
    return LossAndMetrics(
        (weights * losses).sum() * targets.scale(),
        BlockMetrics.of(logits.argmax(dim=-1), targets),
        torch.where(projected_slots(targets, objective, with_overlap), overlap, 0.0).detach(),
    )
