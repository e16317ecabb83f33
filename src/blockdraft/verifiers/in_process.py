"""What verifiers that run in this process share: a transformers model, its taps, its output head.

Taps are read by forward hooks on the decoder layers, so that a family's own forward stays untouched. Whether that
reading is right for a family is not believed but proved when the model is loaded (`prove`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.verifiers.architecture import final_norm_of, require_known
from blockdraft.verifiers.attention import register
from blockdraft.verifiers.identity import identity_of, stop_ids_of
from blockdraft.verifiers.output_side import OutputSide


class InProcessVerifier(OutputSide):
    """Parts of `verifiers.base.Verifier` that do not depend on whether there is an encoder.

    Args:
        model: loaded, with an output head; it is put into evaluation mode.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        require_known(model, name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        self._layers: nn.ModuleList = self._decoder.layers
        super().__init__(config, final_norm_of(model, name), model.get_output_embeddings().weight)
        self.context_length: int = config.max_position_embeddings
        self.stop_ids = stop_ids_of(model.generation_config, tokenizer)
        model.set_attn_implementation(register())
        self.identity = identity_of(model, tokenizer, name)

    @contextlib.contextmanager
    def _recording(self, target_layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect taps while the decoder runs: tap 0 enters the first layer, tap i leaves layer i - 1."""
        taps: dict[int, Tensor] = {}
        handles = []

        def entering(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            taps[0] = args[0]

        def leaving(tap: int) -> Any:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                taps[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        for tap in target_layer_ids:
            if tap == 0:
                handles.append(self._layers[0].register_forward_pre_hook(entering))
            else:
                handles.append(self._layers[tap - 1].register_forward_hook(leaving(tap)))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


def stacked(taps: dict[int, Tensor], target_layer_ids: Sequence[int], final: Tensor) -> Tensor:
    """Recorded taps side by side, [..., L, E]."""
    if not target_layer_ids:
        return final.new_empty(*final.shape[:-1], 0, final.shape[-1])
    return torch.stack([taps[tap] for tap in target_layer_ids], dim=-2)
