"""The encoder-decoder verifier: T5Gemma 2, text only, run in process.

The library's own layers do the arithmetic. What a decoder layer attends to is one softmax over its own positions
(causal, windowed on sliding layers) and all positions of the encoder, whose keys have no rotary embedding. The encoder
runs once for a request; the decoder's own keys lie in a RaggedKV, as those of every verifier do.

A draft sees what the decoder's embedding *module* returns: rows times sqrt(width), and the supervised row of the
image-end token. Engines share that module with a draft, so that trainer and server see the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.errors import InputError
from blockdraft.ops.ragged_kv import RaggedKV
from blockdraft.verifiers.base import Sides, Sources, States
from blockdraft.verifiers.caches import EncoderDecoderCache
from blockdraft.verifiers.in_process import InProcessVerifier, stacked
from blockdraft.verifiers.proof import LENGTH, eager_attention, own_forward, proof_tokens, prove, short_windows


class EncoderDecoderVerifier(InProcessVerifier):
    """See `verifiers.base.Verifier`. `model` is a loaded T5Gemma2ForConditionalGeneration.

    A prompt is what the encoder reads; the decoder begins with its start token.
    """

    has_encoder = True

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        config = model.config
        self._encoder = model.get_encoder().text_model
        self.encoder_length: int = config.encoder.text_config.max_position_embeddings
        self.image_ids = image_ids(config)
        self.decoder_start = decoder_start(config, getattr(model.generation_config, "decoder_start_token_id", None))

    @property
    def _encoder_window(self) -> int:
        return self.model.config.encoder.text_config.sliding_window

    def embed(self, ids: Tensor) -> Tensor:
        """What the decoder's embedding module returns: scaled, with the image-end row in place."""
        return self._decoder.embed_tokens(ids)

    def sides(self, prompt: Sequence[int], name: str) -> Sides:
        check_source(prompt, name, self.model.config, self.tokenizer)
        return Sides([self.decoder_start], list(prompt))

    @torch.no_grad()
    def states(
        self, sequences: Sequence[Tensor], target_layer_ids: Sequence[int], sources: Sources = ()
    ) -> list[States]:
        lengths = [len(sequence) for sequence in sequences]
        encoded_RSE, source_lengths = self._encode(sources)
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        positions_RW = torch.arange(padded.shape[1], device=self.device).expand(padded.shape)
        masks = self._masks(positions_RW, padded.shape[1], source_lengths, encoded_RSE.shape[1])
        whole = self._run(padded, positions_RW, masks, encoded_RSE, target_layer_ids)
        return [States(whole.taps[row, :length], whole.final[row, :length]) for row, length in enumerate(lengths)]

    @torch.no_grad()
    def cache(self, num_rows: int, sources: Sources = ()) -> EncoderDecoderCache:
        """A decoding cache of rows whose sources have gone through the encoder."""
        assert len(sources) == num_rows
        return EncoderDecoderCache(RaggedKV(len(self._layers), num_rows, self.device), *self._encode(sources))

    @torch.no_grad()
    def extend(self, cache: Any, tokens_RW: Tensor, target_layer_ids: Sequence[int]) -> States:
        positions_RW = cache.kv.positions(tokens_RW.shape[1])
        num_keys = cache.kv.longest + tokens_RW.shape[1]
        encoded_RSE = cache.encoded_RSE
        masks = self._masks(positions_RW, num_keys, cache.source_lengths, encoded_RSE.shape[1])
        return self._run(tokens_RW, positions_RW, masks, encoded_RSE, target_layer_ids, cache)

    def _run(
        self,
        tokens_RW: Tensor,
        positions_RW: Tensor,
        masks: dict[str, Any],
        encoded_RSE: Tensor,
        target_layer_ids: Sequence[int],
        cache: EncoderDecoderCache | None = None,
    ) -> States:
        """The decoder's states of a batch of tokens, [R, W, L, E] and [R, W, E]."""
        with self._recording(target_layer_ids) as taps:
            final = self._decoder(
                input_ids=tokens_RW,
                **masks,
                position_ids=positions_RW,
                past_key_values=cache,
                encoder_hidden_states=encoded_RSE,
                use_cache=cache is not None,
            ).last_hidden_state
        return States(stacked(taps, target_layer_ids, final), final)

    def _encode(self, sources: Sources) -> tuple[Tensor, Tensor]:
        """States of the encoder [R, S, E] of sources that are padded on the right, and their lengths [R]."""
        ids = [torch.tensor(source) for source in sources if source]
        assert len(ids) == len(sources), "every row of an encoder-decoder verifier has a source"
        lengths = torch.tensor([len(source) for source in ids], device=self.device)
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
        masks = self._encoder_masks(lengths, padded.shape[1])
        return self._encoder(input_ids=padded, attention_mask=masks).last_hidden_state, lengths

    def _encoder_masks(self, lengths_R: Tensor, width: int) -> dict[str, Tensor]:
        """Which positions each of the encoder's sees, bool [R, 1, S, S]: all, or a window that reaches to both sides.

        Padding sees itself, since a softmax over nothing is not a number.
        """
        places = torch.arange(width, device=self.device)
        before = places[:, None] - places
        window = self._encoder_window
        near = (before < (window + 1) // 2) & (-before < window // 2 + 1)
        full = (places < lengths_R[:, None])[:, None, None, :] | (before == 0)
        return {"full_attention": full, "sliding_attention": full & near}

    def _masks(self, positions_RW: Tensor, num_keys: int, source_lengths: Tensor, width: int) -> dict[str, Any]:
        """What the decoder sees of itself, [R, 1, W, C] for each kind of layer, and of the encoder, [R, 1, W, S]."""
        at = positions_RW[:, None, :, None]
        keys = torch.arange(num_keys, device=self.device)
        causal = keys <= at
        assert self.window is not None
        own = {"full_attention": causal, "sliding_attention": causal & (keys > at - self.window)}
        real = torch.arange(width, device=self.device) < source_lengths[:, None]
        other = real[:, None, None].expand(-1, 1, positions_RW.shape[1], -1)
        return {"attention_mask": own, "encoder_attention_mask": {"full_attention": other}}

    @torch.no_grad()
    def prove(self) -> None:
        """Compare our passes and taps with the model's own forward (`verifiers.proof`).

        Raises:
            InputError: they differ.
        """
        config = self.model.config
        drawn = proof_tokens(config.decoder, self.identity.vocab_size - len(self.image_ids), 4).to(self.device)
        sources, tokens = drawn[:2], drawn[2:]
        lengths = torch.tensor([LENGTH, LENGTH // 2], device=self.device)
        real = torch.arange(LENGTH, device=self.device) < lengths[:, None]
        read = [source[:length].tolist() for source, length in zip(sources, lengths.tolist(), strict=True)]
        with short_windows(self._config, config.encoder.text_config):
            with eager_attention(self.model):
                own = self.model(
                    input_ids=sources,
                    attention_mask=real.long(),
                    decoder_input_ids=tokens,
                    use_cache=False,
                    output_hidden_states=True,
                )
            prove(self, own_forward(own.logits, own.decoder_hidden_states, len(self._layers)), tokens, read)


def image_ids(config: Any) -> frozenset[int]:
    """Tokens that stand for images in a source, by a T5Gemma2Config; there is no image behind them in a text."""
    encoder = config.encoder
    named = (encoder.image_token_index, encoder.boi_token_index, encoder.eoi_token_index)
    return frozenset(index for index in named if index is not None and index < config.decoder.vocab_size)


def decoder_start(config: Any, named: int | None) -> int:
    """The token that a decoder's text begins with, by a T5Gemma2Config.

    Args:
        named: `decoder_start_token_id` of generation_config.json.

    Raises:
        InputError: none is stated, or no token of the vocabulary.
    """
    start = config.decoder.bos_token_id if named is None else named
    if not isinstance(start, int) or not 0 <= start < config.decoder.vocab_size:
        raise InputError(
            "decoder_start_token_id",
            start,
            "a decoder's text begins with a token of the vocabulary; state one in generation_config.json",
        )
    return start


def check_source(source: Sequence[int], name: str, config: Any, tokenizer: Any) -> None:
    """Reject a source that the encoder of a T5Gemma2Config cannot read.

    Raises:
        InputError: it is empty, too long, or holds image tokens or what is no token.
    """
    limit = config.encoder.text_config.max_position_embeddings
    vocab_size = min(config.encoder.text_config.vocab_size, config.decoder.vocab_size)
    if not source:
        raise InputError(name, "empty", "an encoder needs at least one token to read")
    if len(source) > limit:
        raise InputError(name, f"{len(source)} tokens", f"the verifier's encoder reads {limit}; shorten the source")
    for token in source:
        if not 0 <= token < vocab_size:
            raise InputError(name, f"token {token}", f"the verifier has tokens 0 to {vocab_size - 1}")
    for token in image_ids(config).intersection(source):
        raise InputError(
            name, f"token {token} ({tokenizer.decode([token])})", "stands for an image; only text is supported"
        )
