"""Are the logits of a verifier's parts those of its family?

Without its layers, a model's own forward still says what it makes of states behind the final norm: scales, soft caps
and whatever else its family does around the output head. So it is run with layers that give made-up states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockdraft.errors import InputError
from blockdraft.verifiers.output_side import OutputSide
from blockdraft.verifiers.proof import EXACT, difference

POSITIONS = 3
HALF = 0.02  # the same products in the same dtype: nothing but the order of sums differs


class _Given:
    """What a decoder returns, with nothing but its states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def prove_logits(model: Any, parts: OutputSide, name: str) -> None:
    """Compare the logits of parts with those of the model around the same output head.

    Args:
        model: on the meta device; its head becomes that of `parts`, and its layers are of no more use.

    Raises:
        InputError: they differ, or its forward cannot be run so.
    """
    head_VE = parts.head_VE
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(1, POSITIONS, head_VE.shape[1], generator=draw).to(head_VE)

    def reject(why: str) -> InputError:
        return InputError("verifier", name, f"{type(model).__name__} is not supported: {why}")

    model.get_output_embeddings().weight = nn.Parameter(head_VE, requires_grad=False)
    model.base_model.forward = lambda *_, **__: _Given(states)
    ids = torch.zeros(1, POSITIONS, dtype=torch.int64, device=head_VE.device)
    given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    try:
        own = model(input_ids=ids, use_cache=False, **given).logits[0]
    except Exception as error:  # whatever its code raises without layers
        raise reject(f"its output head cannot be run alone ({type(error).__name__})") from error
    found, bound = parts.logits(parts.scaled(states[0])), EXACT if parts.dtype == torch.float32 else HALF
    if own.shape != found.shape or not difference(found, own, parts.dtype) <= bound:
        raise reject("its logits are not understood (a scale, or something else around its output head)")
