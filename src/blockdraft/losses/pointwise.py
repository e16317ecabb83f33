"""Losses of a slot, as values and gradients by the logits.

With draft logits z, q = softmax(z), the verifier's distribution p and its token t:

    ce         -log q_t                             q - onehot(t)
    kl         KL(p || q)                           q - p
    rkl        KL(q || p)                           q (log q - log p - rkl)
    jsd        (KL(p || m) + KL(q || m)) / 2        q (log(q / m) - KL(q || m)) / 2,  m = (p + q) / 2
    tv         1 - sum min(p, q)                    -q (1[q <= p] - s),  s = sum of q where q <= p
    nla        -log(1 - tv)                         tv' / (1 - tv)
    lk_hybrid  l kl + (1 - l) tv                    l kl' + (1 - l) tv',  l = exp(-3 (1 - tv)) a constant

Everything is float32. Gradients are written down rather than left to autograd, which would keep several copies of
[slots, vocabulary]. nla and lk_hybrid: "LK losses" (2026), eta = 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.losses.targets import Distributions
from blockdraft.ops.argmax import fast_argmax

LOSSES = ("ce", "kl", "rkl", "jsd", "tv", "nla", "lk_hybrid")
SMALLEST_OVERLAP = 1e-5
LK_ETA = 3.0
_OVERLAPPING = frozenset({"tv", "nla", "lk_hybrid"})  # made of the overlap of p and q
_TINY = 1e-30  # keeps logarithms of vanished probabilities finite; they are multiplied by such a probability


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Of R slots: weighted sum of the losses, its gradient by the logits [R, V], and what weights and metrics need.

    Attributes:
        values: [R].
        gradient: [R, V], not yet multiplied by slot weights.
        log_target: log q of the verifier's token, [R].
        predicted: the most likely draft id, [R].
        overlap: sum min(p, q), the chance that sampled verification accepts, [R]; None where nobody asked. p is over
            the verifier's whole vocabulary. With no teacher it is all on the verifier's token, and this is q of it.
    """

    values: Tensor
    gradient: Tensor
    log_target: Tensor
    predicted: Tensor
    overlap: Tensor | None


def slot_losses(
    terms: Mapping[str, float],
    logits_RV: Tensor,
    ids_R: Tensor,
    verifier: Distributions | None,
    with_overlap: bool = True,
) -> SlotLosses:
    """Evaluate a weighted sum of losses. `logits_RV` (float32) is overwritten; its buffer may become the gradient."""
    rows = ids_R[:, None]
    predicted = fast_argmax(logits_RV)
    at_target = logits_RV.gather(1, rows)
    largest = logits_RV.gather(1, predicted[:, None])
    cross = None  # p . z: gone once the buffer holds probabilities
    if verifier is not None and {"kl", "lk_hybrid"} & set(terms):
        cross = torch.linalg.vecdot(verifier.probs, logits_RV)[:, None]
    # One fused pass, in place. The largest probability cannot vanish, so it gives the normalizer back.
    q = torch.softmax(logits_RV, dim=-1, out=logits_RV)
    log_sum = largest - q.gather(1, predicted[:, None]).log()
    log_target = at_target - log_sum
    if set(terms) == {"ce"}:
        weight = terms["ce"]
        gradient = q.scatter_add_(1, rows, torch.full_like(at_target, -1.0))
        gradient = gradient if weight == 1 else gradient.mul_(weight)
        return SlotLosses(-weight * log_target[:, 0], gradient, log_target[:, 0], predicted, log_target.exp()[:, 0])
    assert verifier is not None, "these losses need the verifier's distribution"
    overlap = accepted = None
    if _OVERLAPPING & set(terms) or (with_overlap and verifier.share is None):
        overlap = accepted = torch.minimum(verifier.probs, q).sum(dim=-1, keepdim=True)
    if with_overlap and verifier.share is not None:
        accepted = torch.minimum(verifier.probs * verifier.share[:, None], q).sum(dim=-1, keepdim=True)
    divergence = None if cross is None else verifier.negative_entropy[:, None] - (cross - log_sum)
    values, gradient = _with_teacher(terms, q, verifier.probs, overlap, divergence)
    if "ce" in terms:
        values = values - terms["ce"] * log_target
        gradient.scatter_add_(1, rows, torch.full_like(log_target, -terms["ce"]))
    return SlotLosses(values[:, 0], gradient, log_target[:, 0], predicted, None if accepted is None else accepted[:, 0])


def _with_teacher(
    terms: Mapping[str, float], q: Tensor, p: Tensor, overlap: Tensor | None, divergence: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values [R, 1] and gradient [R, V] of all terms, but for cross entropy's value and its pull at the target.

    The gradient is q times something of each row, plus q times something of each token, minus p times something of
    each row. `divergence` is KL(p || q).
    """
    values = torch.zeros_like(q[:, :1])
    towards_p: Tensor | float = terms.get("kl", 0.0)
    per_token: Tensor | None = None
    if overlap is not None and _OVERLAPPING & set(terms):
        mix = torch.exp(-LK_ETA * overlap)  # lk_hybrid's l
        hybrid = terms.get("lk_hybrid", 0.0)
        towards_p = towards_p + hybrid * mix if hybrid else towards_p
        safe = overlap.clamp_min(SMALLEST_OVERLAP)
        slope = torch.where(overlap > SMALLEST_OVERLAP, terms.get("nla", 0.0) / safe, 0.0)
        slope = slope + terms.get("tv", 0.0) + hybrid * (1 - mix)
        values = (
            values + (terms.get("tv", 0.0) + hybrid * (1 - mix)) * (1 - overlap) - terms.get("nla", 0.0) * safe.log()
        )
        below = (q <= p).to(q.dtype)
        per_token = below.sub_(torch.linalg.vecdot(q, below)[:, None]).mul_(-slope)
    if divergence is not None:
        values = values + towards_p * divergence
    if weight := terms.get("rkl"):
        ratio = q.clamp_min(_TINY).log_().sub_(p.clamp_min(_TINY).log_())
        value = torch.linalg.vecdot(q, ratio)[:, None]
        values = values + weight * value
        per_token = _plus(per_token, ratio.sub_(value).mul_(weight))
    if weight := terms.get("jsd"):
        middle = (p + q).mul_(0.5).clamp_min_(_TINY).log_()
        ratio = q.clamp_min(_TINY).log_().sub_(middle)
        from_q = torch.linalg.vecdot(q, ratio)[:, None]
        from_p = (torch.xlogy(p, p) - p * middle).sum(dim=-1, keepdim=True)
        values = values + weight * 0.5 * (from_q + from_p)
        per_token = _plus(per_token, ratio.sub_(from_q).mul_(0.5 * weight))
    per_row = towards_p + terms.get("ce", 0.0)
    if per_token is not None:
        gradient = q.mul_(per_token.add_(per_row))
    else:
        gradient = q.mul_(per_row)
    if isinstance(towards_p, Tensor):
        gradient.addcmul_(p, towards_p.expand_as(p), value=-1)
    elif towards_p:
        gradient.sub_(p, alpha=towards_p)
    return values, gradient


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)
