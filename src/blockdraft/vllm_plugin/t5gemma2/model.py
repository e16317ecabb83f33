"""T5Gemma 2, text only, as a model of vLLM 0.32 (V1 runner).

The engine's parallel layers, norms and rotary embedding; attention is in `attention`, and how a prompt becomes a
source is in `prompts`. The order of the layers is that of transformers' T5Gemma2ForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gemma3 import Gemma3MLP
from vllm.model_executor.models.interfaces import EagleModelMixin, SupportsEagle3, SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform

from blockdraft.errors import InputError
from blockdraft.vllm_plugin.facts import on_v1_runner
from blockdraft.vllm_plugin.t5gemma2.attention import EncoderAttention, MergedAttention, Plans
from blockdraft.vllm_plugin.t5gemma2.prompts import MODALITY, SourceDummies, SourceInfo, SourceProcessor

STACKED = {
    ".q_proj.": (".qkv_proj.", "q"), ".k_proj.": (".qkv_proj.", "k"), ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0), ".up_proj.": (".gate_up_proj.", 1),
}  # fmt: skip
# Names in a file that begin so, and what they begin with here; None where there is no such part. First match counts.
RENAMED = {
    "model.encoder.vision_tower.": None,
    "model.encoder.multi_modal_projector.": None,
    "model.encoder.text_model.embed_tokens.": "model.embed_tokens.",
    "model.encoder.embed_tokens.": "model.embed_tokens.",
    "model.decoder.embed_tokens.": None,  # tied
    "model.encoder.text_model.": "encoder.",
    "model.encoder.": "encoder.",
    "model.decoder.": "model.",
    "lm_head.": None,  # tied
}


class ScaledEmbedding(VocabParallelEmbedding):
    """Rows times sqrt(width), and one supervised row that is not scaled. A draft shares this module."""

    def __init__(self, config: Any, special: int, prefix: str) -> None:
        super().__init__(config.vocab_size, config.hidden_size, prefix=prefix)
        self.eoi_embedding = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False)
        self._scale, self._special = config.hidden_size**0.5, special

    def forward(self, input_: Tensor) -> Tensor:
        rows = super().forward(input_)
        scaled = rows * torch.tensor(self._scale, dtype=rows.dtype, device=rows.device)  # rounded as the rows are
        return torch.where((input_ == self._special)[..., None], self.eoi_embedding.to(rows.dtype), scaled)


class Layer(nn.Module):
    """An attention and a feed-forward part, each between two norms and beside a residual."""

    def __init__(self, attention: nn.Module, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = Gemma3MLP(
            config.hidden_size, config.intermediate_size, config.hidden_activation, quant_config, f"{prefix}.mlp"
        )
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_self_attn_layernorm: nn.Module = GemmaRMSNorm(width, eps)
        self.post_self_attn_layernorm: nn.Module = GemmaRMSNorm(width, eps)
        self.pre_feedforward_layernorm: nn.Module = GemmaRMSNorm(width, eps)
        self.post_feedforward_layernorm: nn.Module = GemmaRMSNorm(width, eps)

    def forward(self, hidden_NE: Tensor, *context: Any) -> Tensor:
        attended = self.self_attn(self.pre_self_attn_layernorm(hidden_NE), *context)
        hidden_NE = hidden_NE + self.post_self_attn_layernorm(attended)
        return hidden_NE + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_NE)))


class Encoder(nn.Module):
    """The text encoder; embeddings come from outside, since they are the decoder's."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        names = [f"{prefix}.layers.{index}" for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(
            Layer(EncoderAttention(config, i, quant_config, f"{name}.self_attn"), config, quant_config, name)
            for i, name in enumerate(names)
        )
        self.norm: nn.Module = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedded_SE: Tensor) -> Tensor:
        """States of one source."""
        positions = torch.arange(len(embedded_SE), device=embedded_SE.device)
        for layer in self.layers:
            embedded_SE = layer(embedded_SE, positions)
        return self.norm(embedded_SE)


class Decoder(nn.Module, EagleModelMixin):
    """The decoder, with the embeddings that everybody shares."""

    def __init__(self, config: Any, special: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        cache_config, quant_config = vllm_config.cache_config, vllm_config.quant_config
        self.start_layer = 0
        self.embed_tokens: nn.Module = ScaledEmbedding(config, special, f"{prefix}.embed_tokens")
        names = [f"{prefix}.layers.{index}" for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(
            Layer(
                MergedAttention(config, i, cache_config, quant_config, f"{name}.self_attn"), config, quant_config, name
            )
            for i, name in enumerate(names)
        )
        self.norm: nn.Module = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, encoded: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """States after the final norm, and the residual stream at the taps that a draft asked for."""
        hidden = self.embed_tokens(input_ids)
        begun = torch.cat(encoded) if encoded else None
        plans: Plans = {}
        record: Any = self._maybe_add_hidden_state
        taps = record([], 0, hidden, None)
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, positions, begun, plans)
            taps = record(taps, number, hidden, None)
        return self.norm(hidden), taps


@MULTIMODAL_REGISTRY.register_processor(SourceProcessor, info=SourceInfo, dummy_inputs=SourceDummies)
class T5Gemma2ForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsEagle3):
    """To the engine a source is an item of a modality, as it has it for every model with an encoder."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        _require_engine(vllm_config)
        self.config = config
        decoder, text = config.decoder, config.encoder.text_config
        mark: Any = self._mark_composite_model
        with mark(vllm_config, language_targets=Decoder, tower_targets={MODALITY: Encoder}):
            self.model: Any = Decoder(decoder, config.eoi_token_index, vllm_config, f"{prefix}model")
            self.encoder: nn.Module = Encoder(text, vllm_config.quant_config, f"{prefix}encoder")
        self.lm_head = ParallelLMHead(decoder.vocab_size, decoder.hidden_size, prefix=f"{prefix}lm_head")
        self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(decoder.vocab_size, soft_cap=decoder.final_logit_softcapping)

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """A source has no sign in a text that would stand for it."""
        return None

    def get_language_model(self) -> nn.Module:
        """What has `model` (with its embeddings) and `lm_head`, which a draft shares."""
        return self

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """States of the encoder [S, E] for each source."""
        return [self.encoder(self.model.embed_tokens(source)) for source in kwargs["source_ids"]]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        final, taps = self.model(input_ids, positions, encoder_outputs or [])
        return (final, taps) if taps else final

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load every parameter from transformers' names; returns the names of those that were."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for given, tensor in weights:
            start = next((start for start in RENAMED if given.startswith(start)), "")
            own = RENAMED.get(start, "")
            if own is None:
                continue
            name, shard = own + given.removeprefix(start), None
            for part, (whole, which) in STACKED.items():
                if part in name:
                    name, shard = name.replace(part, whole), which
            if name not in parameters:
                raise ValueError(f"tensor {given} is not part of a T5Gemma 2")
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor, *([] if shard is None else [shard]))
            loaded.add(name)
        if missing := parameters.keys() - loaded - {"lm_head.weight"}:
            raise ValueError(f"tensors are missing: {', '.join(sorted(missing)[:3])}")
        return loaded | {"lm_head.weight"}


def _require_engine(vllm_config: VllmConfig) -> None:
    """Reject by name what this model was not written for."""
    if not vllm_config.model_config.hf_config.tie_word_embeddings:
        raise InputError("tie_word_embeddings", False, "T5Gemma 2 with an output head of its own is not supported")
    if not on_v1_runner():
        raise InputError("VLLM_USE_V2_MODEL_RUNNER", "not 0", "T5Gemma 2 runs on vLLM's V1 runner; set it to 0")
    if not current_platform.is_cpu() and not vllm_config.model_config.enforce_eager:
        raise InputError("--enforce-eager", "not given", "T5Gemma 2 gathers its keys step by step; give it")
