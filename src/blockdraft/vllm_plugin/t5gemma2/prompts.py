"""How an ordinary prompt becomes the source of an encoder, in vLLM 0.32.

The engine has inputs of an encoder as items of a modality beside the decoder's prompt. It gives a plain prompt to the
decoder; here it goes to the encoder (`with_source`), and the decoder's prompt is its start token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataParser, ProcessorBatchItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    PromptReplacement,
)

from blockdraft.errors import InputError
from blockdraft.verifiers.encoder_decoder import check_source, decoder_start

MODALITY = "text"
PLACE = 0  # stands in the encoder's prompt until the source takes its place


class Sources(ProcessorBatchItems):
    """Token ids of sources."""

    def __init__(self, data: Sequence[Any]) -> None:
        try:
            super().__init__([np.asarray(source, dtype=np.int64) for source in data], MODALITY)
        except OverflowError as error:
            raise ValueError(f"prompt: {error}") from None  # what the server answers with 400

    def get_processor_data(self) -> Mapping[str, object]:
        return {}


class SourceParser(MultiModalDataParser):
    """Knows sources and nothing else: images are rejected by the engine's own message."""

    def _get_subparsers(self) -> Mapping[str, Callable[[Any], Any]]:
        return {MODALITY: Sources}


class SourceInfo(BaseProcessingInfo):
    """What the engine asks before it reads anything."""

    def get_data_parser(self) -> MultiModalDataParser:
        return SourceParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: 1}

    @property
    def supported_mm_processor_kwargs(self) -> dict[str, set[str]]:
        return {}

    @property
    def longest_source(self) -> int:
        """The encoder's own limit."""
        return int(self.get_hf_config().encoder.text_config.max_position_embeddings)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {MODALITY: min(seq_len, self.longest_source)}

    def decoder_start(self) -> int:
        """The token that a decoder's text begins with."""
        generation = self.ctx.model_config.try_get_generation_config() or {}
        named = generation.get("decoder_start_token_id")
        return decoder_start(self.get_hf_config(), named)


class SourceDummies(BaseDummyInputsBuilder[SourceInfo]):
    """The longest source, for measuring memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        length = min(seq_len, self.info.longest_source)
        return {MODALITY: [np.full(length, PLACE)] * mm_counts.get(MODALITY, 0)}


class SourceProcessor(EncDecMultiModalProcessor[SourceInfo]):
    """From a source to what the model's `embed_multimodal` gets."""

    skip_decoder_start_token = True  # it stands in the prompt that is made here

    def create_encoder_prompt(self, prompt: list[int], mm_items: Any) -> list[int]:
        return [PLACE]

    def create_decoder_prompt(self, prompt: str | list[int], mm_items: Any) -> str | list[int]:
        return [self.info.decoder_start()]

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        config = self.info.get_hf_config()
        sources = mm_items.get_items(MODALITY, Sources).get_all()
        for source in sources:
            try:
                check_source(source.tolist(), "prompt", config, self.info.get_tokenizer())
            except InputError as error:
                raise ValueError(str(error)) from None  # what the server answers with 400
        return BatchFeature({"source_ids": [torch.from_numpy(source) for source in sources]})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"source_ids": MultiModalFieldConfig.batched(MODALITY)}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        sources = mm_items.get_items(MODALITY, Sources)
        return [PromptReplacement(MODALITY, [PLACE], lambda index: [PLACE] * len(sources.get(index)))]


def with_source(renderer: Any, prompt: Any) -> Any:
    """A tokenized prompt whose tokens are given to the encoder where the model is ours.

    A text comes as a prompt for the encoder already, a rendered chat as a plain one.
    """
    if not isinstance(renderer.mm_processor, SourceProcessor):
        return prompt
    encoder = prompt.get("encoder_prompt", prompt)
    if not encoder.get("multi_modal_data"):
        encoder = {**encoder, "multi_modal_data": {MODALITY: [encoder["prompt_token_ids"]]}}
    return {"encoder_prompt": encoder, "decoder_prompt": prompt.get("decoder_prompt")}


def with_text(processed: Any, prompt: Any) -> Any:
    """A processed prompt that still has its text, which a request with `echo` wants back: that of the source.

    Args:
        prompt: what was processed (`with_source`).
    """
    text = prompt.get("encoder_prompt", {}).get("prompt") if isinstance(prompt, dict) else None
    if text is not None and processed.get("type") == "enc_dec":
        processed["encoder_prompt"]["prompt"] = text
    return processed
