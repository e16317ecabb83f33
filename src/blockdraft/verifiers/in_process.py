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

from blockdraft.errors import InputError
from blockdraft.ops.head import head_logits
from blockdraft.verifiers.attention import register
from blockdraft.verifiers.base import LayerShape
from blockdraft.verifiers.identity import final_norm_of, identity_of, softcap_of, stop_ids_of

GREEDY_ROWS = 128  # positions whose logits exist at once when only the likeliest token is wanted


class InProcessVerifier:
    """Parts of `verifiers.base.Verifier` that do not depend on whether there is an encoder.

    Args:
        model: loaded, with an output head; it is put into evaluation mode.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        self._layers: nn.ModuleList = self._decoder.layers
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise InputError("verifier", name, "its output head has a bias, which drafts of this family cannot share")
        self.head_VE: Tensor = head.weight
        self.logit_softcap = softcap_of(config)
        self.final_norm = final_norm_of(config)
        self.context_length: int = config.max_position_embeddings
        self.stop_ids = stop_ids_of(model.generation_config, tokenizer)
        self._window: int | None = getattr(config, "sliding_window", None)
        model.set_attn_implementation(register())
        self.identity = identity_of(model, tokenizer, name)

    @property
    def dtype(self) -> torch.dtype:
        return self.head_VE.dtype

    @property
    def device(self) -> torch.device:
        return self.head_VE.device

    def layer_shape(self) -> LayerShape:
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        return LayerShape(
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            # Read, never derived where it is stated: families differ from hidden_size / heads.
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        )

    def rope_parameters(self) -> dict[str, Any]:
        parameters = dict(self.model.config.get_text_config().rope_parameters or {})
        # Families with one dictionary a layer type: a draft has full attention first of all, so it takes that one.
        nested = parameters.get("full_attention")
        return dict(nested) if isinstance(nested, dict) else parameters

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        logits = head_logits(final, self.head_VE).float()
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    @torch.no_grad()
    def greedy(self, final_TE: Tensor) -> Tensor:
        parts = [self.logits(part).argmax(dim=-1) for part in final_TE.split(GREEDY_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.device)

    def _require_equal(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse a model whose own logits are not ours, given pairs of (ours, its own).

        Raises:
            InputError: the family does something between embedding and logits that this class does not know.
        """
        largest = max(float(wanted.abs().max()) for _, wanted in pairs)
        bound = (1e-3 if self.dtype == torch.float32 else 6e-2) * largest
        error = max(float((found - wanted).abs().max()) for found, wanted in pairs)
        if not error <= bound:
            raise InputError(
                "verifier",
                self.identity.name,
                f"{self.identity.architecture} is of a kind that blockdraft cannot drive: its logits differ from the "
                f"model's own by {error:.3g} (allowed {bound:.3g})",
            )

    @contextlib.contextmanager
    def _recording(self, tap_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect taps while the decoder runs: tap 0 enters the first layer, tap i leaves layer i - 1."""
        taps: dict[int, Tensor] = {}
        handles = []

        def entering(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            taps[0] = args[0]

        def leaving(tap: int) -> Any:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                taps[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        for tap in tap_ids:
            if tap == 0:
                handles.append(self._layers[0].register_forward_pre_hook(entering))
            else:
                handles.append(self._layers[tap - 1].register_forward_hook(leaving(tap)))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


def stacked(taps: dict[int, Tensor], tap_ids: Sequence[int], final: Tensor) -> Tensor:
    """Recorded taps side by side, [..., L, E]."""
    if not tap_ids:
        return final.new_empty(*final.shape[:-1], 0, final.shape[-1])
    return torch.stack([taps[tap] for tap in tap_ids], dim=-2)
