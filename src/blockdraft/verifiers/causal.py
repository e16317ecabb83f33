"""A decoder-only verifier: any transformers causal language model, run in process.

The library's own modules do the arithmetic; the loop, the cache and the taps are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from blockdraft.errors import InputError
from blockdraft.ops.prefix import shared_prefix
from blockdraft.ops.ragged_kv import RaggedKV
from blockdraft.verifiers.architecture import FULL, SLIDING, layer_types
from blockdraft.verifiers.base import Sides, Sources, States
from blockdraft.verifiers.caches import CausalCache
from blockdraft.verifiers.in_process import InProcessVerifier, stacked
from blockdraft.verifiers.proof import eager_attention, own_forward, proof_tokens, prove, short_windows


class CausalVerifier(InProcessVerifier):
    """See `verifiers.base.Verifier`. `model` is a loaded ...ForCausalLM."""

    has_encoder = False

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        super().__init__(model, tokenizer, name)
        self._table = cast(Tensor, model.get_input_embeddings().weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Raw rows of the input table, before any scale that the family applies outside of it."""
        return embedding(ids, self._table)

    def sides(self, prompt: Sequence[int], name: str) -> Sides:
        return decoder_sides(prompt, name, self.context_length)

    @torch.no_grad()
    def states(
        self, sequences: Sequence[Tensor], target_layer_ids: Sequence[int], sources: Sources = ()
    ) -> list[States]:
        assert not any(sources), "a decoder-only verifier reads no sources"
        if shared := shared_prefix(sequences):
            return self._states_after_prefix(sequences, target_layer_ids, shared)
        lengths = [len(sequence) for sequence in sequences]
        # Right padding needs no mask: under causal attention no real position sees the padding behind it.
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        with self._recording(target_layer_ids) as taps:
            final = self.scaled(self._decoder(input_ids=padded, use_cache=False).last_hidden_state)
        taps_RCLE = stacked(taps, target_layer_ids, final)
        return [States(taps_RCLE[row, :length], final[row, :length]) for row, length in enumerate(lengths)]

    def _states_after_prefix(
        self, sequences: Sequence[Tensor], target_layer_ids: Sequence[int], shared: int
    ) -> list[States]:
        """`states` of sequences whose first `shared` tokens are the same, which are run once."""
        cache = self.cache(1)
        prefix = self.extend(cache, sequences[0][None, :shared].to(self.device), target_layer_ids)
        cache.kv.commit(torch.tensor([shared], device=self.device))
        cache.keep_rows(torch.zeros(len(sequences), dtype=torch.int64, device=self.device))
        rest = nn.utils.rnn.pad_sequence([sequence[shared:] for sequence in sequences], batch_first=True)
        own = self.extend(cache, rest.to(self.device), target_layer_ids)
        return [
            States(
                torch.cat([prefix.taps[0], own.taps[row, : len(sequence) - shared]]),
                torch.cat([prefix.final[0], own.final[row, : len(sequence) - shared]]),
            )
            for row, sequence in enumerate(sequences)
        ]

    def cache(self, num_rows: int, sources: Sources = ()) -> CausalCache:
        assert not any(sources), "a decoder-only verifier reads no sources"
        return CausalCache(RaggedKV(len(self._layers), num_rows, self.device))

    @torch.no_grad()
    def extend(self, cache: Any, tokens_RW: Tensor, target_layer_ids: Sequence[int]) -> States:
        positions_RW = cache.kv.positions(tokens_RW.shape[1])
        keys = torch.arange(cache.kv.longest + tokens_RW.shape[1], device=self.device)
        causal = keys <= positions_RW[..., None]
        mask: Any = causal[:, None]
        if self.window is not None:
            windowed = (causal & (keys > positions_RW[..., None] - self.window))[:, None]
            # Families whose layers have types take one mask a type, the others take one for all.
            mask = {FULL: mask, SLIDING: windowed} if layer_types(self._config) else windowed
        with self._recording(target_layer_ids) as taps:
            final = self._decoder(
                input_ids=tokens_RW,
                attention_mask=mask,
                position_ids=positions_RW,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return States(stacked(taps, target_layer_ids, final), self.scaled(final))

    @torch.no_grad()
    def prove(self) -> None:
        """Compare our passes and taps with the model's own forward (`verifiers.proof`).

        Raises:
            InputError: they differ.
        """
        tokens = proof_tokens(self.model.config, self.identity.vocab_size, 2).to(self.device)
        with short_windows(self._config):
            with eager_attention(self.model):
                own = self.model(tokens, use_cache=False, output_hidden_states=True)
            prove(self, own_forward(own.logits, own.hidden_states, len(self._layers)), tokens)


def decoder_sides(prompt: Sequence[int], name: str, context_length: int) -> Sides:
    """A prompt that goes to the decoder whole.

    Raises:
        InputError: it is empty, or leaves no room for a reply.
    """
    if not prompt:
        raise InputError(name, "empty", "a prompt needs at least one token")
    if len(prompt) >= context_length:
        raise InputError(
            name, f"{len(prompt)} tokens", f"the verifier's context holds {context_length}; shorten the prompt"
        )
    return Sides(list(prompt))
