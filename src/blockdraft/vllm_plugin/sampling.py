"""Two faults of vLLM 0.32 in sampling with a draft, patched for every draft.

Greedy decoding passes through neither. Tests in tests/serving/test_plugin.py fail when the engine has fixed them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def patch_sampling() -> None:
    """Replace both functions where the engine's rejection sampler looks them up.

    On the CPU the kernel that repeats a request's temperature for each of its tokens loses what it wrote: it converts
    the output to integers and fills the copy. Sampling with any draft then draws from distributions of an uninitialized
    temperature, and the text is not the verifier's any more.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.apply_sampling_constraints = without_empty_steps(rejection_sampler.apply_sampling_constraints)
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = repeated_for_tokens


def without_empty_steps(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The engine's `apply_sampling_constraints`, which a step without proposed tokens does not reach.

    The rejection sampler also runs in steps in which no request has proposed tokens yet, such as a prompt's. With
    `top_k` alone the stock function takes the maximum of nothing there, and the engine ends for everybody.
    """

    @functools.wraps(stock)
    def apply(logits_NV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return stock(logits_NV, *args, **kwargs) if len(logits_NV) else logits_NV

    return apply


def repeated_for_tokens(
    values_R: Tensor, cumulated_R: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each request's value for each of its tokens, [num_tokens]; `replace_from` becomes `replace_to`.

    Args:
        cumulated_R: number of tokens of the requests up to each, cumulated.
    """
    counts = torch.diff(cumulated_R, prepend=cumulated_R.new_zeros(1))
    values = torch.where(values_R == replace_from, replace_to, values_R).to(values_R.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)
