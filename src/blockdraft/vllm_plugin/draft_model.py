"""Any combination of draft components as a vLLM 0.32 model (V1 runner).

The transformer layers, the paged cache and the output head are the engine's own DFlash classes. What those lack comes
from `blockdraft.models`, the very modules that training runs: context fusion, sequential and confidence heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from blockdraft.checkpoints.speculators import FILE_NAMES
from blockdraft.models.fusion import CONTEXT_FUSION
from blockdraft.models.heads import ConfidenceHead, SequentialHead
from blockdraft.vllm_plugin.facts import contract_in

CONTEXT_PROJECTIONS = ("k_proj_target", "v_proj_target")


def normalized_context_keys(backbone: Any, keys_YNKH: Tensor) -> Tensor:
    """Context keys of all layers, each under its own layer's norm."""
    normalized = rms_norm(keys_YNKH, keys_YNKH.shape[-1:], None, backbone._rms_norm_eps)
    return (normalized * backbone._k_norm_weights[:, None, None]).contiguous()


class BlockDraftDecoderLayer(DFlashQwen3DecoderLayer):
    """A DFlash layer that may have separate projections for the context."""

    def __init__(self, vllm_config: VllmConfig, *, config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config, config=config, prefix=prefix, **kwargs)
        if contract_in(config).draft.context_kv == "separate":
            attention = self.self_attn
            for name in CONTEXT_PROJECTIONS:
                width = attention.total_num_kv_heads * attention.head_dim
                projection = ColumnParallelLinear(
                    config.hidden_size, width, bias=False, prefix=f"{prefix}.self_attn.{name}"
                )
                setattr(attention, name, projection)


class BlockDraftBackbone(DFlashQwen3Model):
    """DFlash's layers, whose context may differ from layer to layer.

    `fc` and `hidden_norm` of the base class are gone: fusion, its norm included, is done before
    (`BlockDraftForCausalLM.combine_hidden_states`).
    """

    decoder_layer_cls = BlockDraftDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        del self.fc, self.hidden_norm

    def _build_context_kv_buffers(self, layers_attn: list[Any], has_bias: bool) -> None:
        """Stack each layer's key and value projection of the context, [Y, 2 * K * H, D]."""
        del has_bias  # drafts of this family have none
        weights = [
            torch.cat([getattr(attention, name).weight for name in CONTEXT_PROJECTIONS])
            if hasattr(attention, CONTEXT_PROJECTIONS[0])
            else attention.qkv_proj.weight[attention.q_size :]
            for attention in layers_attn
        ]
        self._context_weights_YKD = torch.stack(weights)
        self._k_norm_weights = torch.stack([attention.k_norm.weight.data for attention in layers_attn])

    def _project_context_kv(
        self, context_states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [Y, N, K, H] of contexts [N, D] that all layers share, or [N, Y, D], one a layer."""
        weights = self._context_weights_YKD
        if context_states.dim() == 2:
            flat = linear(context_states, weights.flatten(0, 1))
            projected = flat.view(num_ctx, num_layers, 2, num_kv_heads, head_dim).permute(2, 1, 0, 3, 4)
        else:
            flat = torch.bmm(context_states.transpose(0, 1), weights.transpose(1, 2))
            projected = flat.view(num_layers, num_ctx, 2, num_kv_heads, head_dim).permute(2, 0, 1, 3, 4)
        keys, values = projected.contiguous()
        return keys, values

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        return normalized_context_keys(self, all_k)


class BlockDraftForCausalLM(DFlashQwen3ForCausalLM):
    """The engine's DFlash draft with our components. Offers what `decoding.proposals.propose` needs."""

    model_cls = BlockDraftBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = contract_in(self.config).draft
        self.draft_config = config
        self.fusion = CONTEXT_FUSION[config.context_fusion](config)
        self.sequential = SequentialHead(config) if config.sequential_head != "none" else None
        self.confidence = ConfidenceHead(config) if config.confidence_head != "none" else None

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Concatenated taps [N, L * E] to the context of all layers [N, D], or of each [N, Y, D]."""
        taps = hidden_states.unflatten(-1, (len(self.draft_config.target_layer_ids), -1))
        return self.fusion(taps).squeeze(-2)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [..., Vd] over the draft's own vocabulary, before any sequential correction."""
        flat = self.logits_processor(self.lm_head, hidden.flatten(0, -2))
        return flat.float().view(*hidden.shape[:-1], -1)

    def to_verifier_ids(self, draft_ids: Tensor) -> Tensor:
        """The verifier's ids of tokens chosen from the draft's logits."""
        offsets = self.draft_id_to_target_id
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]

    def over_verifier_vocabulary(self, probs: Tensor) -> Tensor:
        """Probabilities [N, Vd] over the verifier's vocabulary [N, V]; what the draft cannot say has none."""
        offsets = self.draft_id_to_target_id
        if offsets is None:
            return probs
        full = probs.new_zeros(len(probs), self.config.vocab_size)
        full[:, torch.arange(len(offsets), device=probs.device) + offsets] = probs
        return full

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """float32 logits [...] of acceptance; None without such a head."""
        if self.confidence is None:
            return None
        embedded = None if self.sequential is None else self.sequential.embed(previous, hidden.dtype)
        return self.confidence(hidden, embedded)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load our own tensors, every one of them, and leave the rest to the engine's class."""
        own = dict(self._own_tensors())
        missing = set(own)
        rest = []
        for name, tensor in weights:
            if name not in own:
                rest.append((name, tensor))
                continue
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"checkpoint tensors are missing: {', '.join(sorted(missing))}")
        super().load_weights(rest)

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that the engine's class does not know, under their names in the file."""
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in tensors.items():
            if name.startswith(("fusion.", "sequential.", "confidence.")):
                yield FILE_NAMES[name], tensor
            elif any(f".{projection}." in name for projection in CONTEXT_PROJECTIONS):
                yield name.removeprefix("model."), tensor
