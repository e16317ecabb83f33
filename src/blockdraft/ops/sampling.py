"""From logits to the distribution that is sampled from."""

from __future__ import annotations

import torch
from torch import Tensor


def sampling_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p (nucleus), float32, same shape [..., V].

    Draft and verifier logits go through the same function, since rejection sampling is lossless for whatever
    distribution the verifier is asked to sample from. `top_k` 0 and `top_p` 1 leave all tokens in.
    """
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        # A token stays while the mass before it is under top_p, so at least one always stays.
        keep = ordered.cumsum(dim=-1) - ordered < top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * keep)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs
