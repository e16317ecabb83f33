"""Hidden states of verifiers whose classes in vLLM 0.32 do not return them.

A draft reads hidden states that the engine takes from its own model class (`EagleModelMixin`). The families below have
the engine's ordinary loop over layers, but no code that keeps what a tap needs. Here they get that loop with it, as the
engine's Llama has it. The plugin registers each under the name `blockdraft.vllm_plugin.hidden_states:ARCHITECTURE`;
the class is patched when the engine asks for it, so that other models pay nothing.
"""

from __future__ import annotations

import importlib
from itertools import islice
from typing import Any

from torch import Tensor
from vllm.distributed import get_pp_group
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, supports_eagle3
from vllm.sequence import IntermediateTensors

from blockdraft.vllm_plugin.support import PATCHED


def __getattr__(architecture: str) -> type:
    """The engine's class of an architecture, patched; how the engine's registry looks it up."""
    if architecture not in PATCHED:
        raise AttributeError(architecture)
    return with_hidden_states(architecture)


def with_hidden_states(architecture: str) -> type:
    """The engine's class of a family in `PATCHED`, which gives hidden states from then on."""
    family = PATCHED[architecture]
    module = importlib.import_module(f"vllm.model_executor.models.{family.module}")
    outer = getattr(module, family.model)
    if not supports_eagle3(outer):
        outer.__bases__ = (*outer.__bases__, SupportsEagle3)
    inner = getattr(module, family.decoder) if family.decoder else None
    if inner is not None and not issubclass(inner, EagleModelMixin):
        inner.__bases__ = (*inner.__bases__, EagleModelMixin)
        inner.forward = forward
    return outer


def forward(
    self: Any,
    input_ids: Tensor | None,
    positions: Tensor,
    intermediate_tensors: IntermediateTensors | None = None,
    inputs_embeds: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The loop where the residual stream after a layer is the sum of the two tensors that the layer returns."""
    hidden_states, residual = first_input(self, input_ids, intermediate_tensors, inputs_embeds)
    taps = self._maybe_add_hidden_state([], self.start_layer, hidden_states, residual)
    for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer):
        hidden_states, residual = layer(positions, hidden_states, residual, **kwargs)
        self._maybe_add_hidden_state(taps, index + 1, hidden_states, residual)
    if not get_pp_group().is_last_rank:
        return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
    hidden_states, _ = self.norm(hidden_states, residual)
    return (hidden_states, taps) if taps else hidden_states


def first_input(
    self: Any, input_ids: Tensor | None, received: IntermediateTensors | None, inputs_embeds: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the first layer of this rank reads: embeddings, or what the rank before sent."""
    if get_pp_group().is_first_rank:
        return (self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds), None
    assert received is not None
    return received["hidden_states"], received["residual"]
