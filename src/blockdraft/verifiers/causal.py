"""A decoder-only verifier: any transformers causal language model, run in process.

The library's own modules do the arithmetic; the loop, the cache and the taps are ours. Taps are read by forward hooks
on the decoder layers, so that a family's own forward stays untouched. Whether that reading is right for a family is
not believed but proved when the model is loaded (`prove`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from blockdraft.errors import InputError
from blockdraft.ops.head import head_logits
from blockdraft.ops.prefix import shared_prefix
from blockdraft.ops.ragged_kv import RaggedKV
from blockdraft.verifiers.attention import register
from blockdraft.verifiers.base import LayerShape, States, VerifierCache
from blockdraft.verifiers.identity import final_norm_of, identity_of, softcap_of, stop_ids_of

GREEDY_ROWS = 128  # positions whose logits exist at once when only the likeliest token is wanted


class CausalCache(Cache):
    """transformers' cache interface over a RaggedKV: an update writes, only `kv.commit` keeps."""

    def __init__(self, kv: RaggedKV) -> None:
        super().__init__(layers=[])
        self.kv = kv

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self.kv.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest


class CausalVerifier:
    """See `verifiers.base.Verifier`. `model` is a loaded ...ForCausalLM in evaluation mode."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self._decoder = model.get_decoder()
        self._layers: nn.ModuleList = self._decoder.layers
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise InputError("verifier", name, "its output head has a bias, which drafts of this family cannot share")
        self.embedding_VE = cast(Tensor, model.get_input_embeddings().weight)
        self.head_VE: Tensor = head.weight
        self.logit_softcap = softcap_of(config)
        self.final_norm = final_norm_of(config)
        self.context_length: int = config.max_position_embeddings
        self.stop_ids = stop_ids_of(model.generation_config, tokenizer)
        self._window: int | None = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None) or []
        self._mixed = "sliding_attention" in layer_types
        if set(layer_types) - {"full_attention", "sliding_attention"}:
            raise InputError("verifier", name, f"layer types {sorted(set(layer_types))} are not supported")
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
    def states(self, sequences: Sequence[Tensor], tap_ids: Sequence[int]) -> list[States]:
        if shared := shared_prefix(sequences):
            return self._states_after_prefix(sequences, tap_ids, shared)
        lengths = [len(sequence) for sequence in sequences]
        # Right padding needs no mask: under causal attention no real position sees the padding behind it.
        padded = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        with self._recording(tap_ids) as taps:
            final = self._decoder(input_ids=padded, use_cache=False).last_hidden_state
        taps_RCLE = _stacked(taps, tap_ids, final)
        return [States(taps_RCLE[row, :length], final[row, :length]) for row, length in enumerate(lengths)]

    def _states_after_prefix(self, sequences: Sequence[Tensor], tap_ids: Sequence[int], shared: int) -> list[States]:
        """`states` of sequences whose first `shared` tokens are the same, which are run once."""
        cache = self.cache(1)
        prefix = self.extend(cache, sequences[0][None, :shared].to(self.device), tap_ids)
        cache.kv.commit(torch.tensor([shared], device=self.device))
        cache.kv.keep_rows(torch.zeros(len(sequences), dtype=torch.int64, device=self.device))
        rest = nn.utils.rnn.pad_sequence([sequence[shared:] for sequence in sequences], batch_first=True)
        own = self.extend(cache, rest.to(self.device), tap_ids)
        return [
            States(
                torch.cat([prefix.taps[0], own.taps[row, : len(sequence) - shared]]),
                torch.cat([prefix.final[0], own.final[row, : len(sequence) - shared]]),
            )
            for row, sequence in enumerate(sequences)
        ]

    def cache(self, num_rows: int) -> CausalCache:
        return CausalCache(RaggedKV(len(self._layers), num_rows, self.device))

    @torch.no_grad()
    def extend(self, cache: VerifierCache, tokens_RW: Tensor, tap_ids: Sequence[int]) -> States:
        positions_RW = cache.kv.positions(tokens_RW.shape[1])
        keys = torch.arange(cache.kv.longest + tokens_RW.shape[1], device=self.device)
        causal = keys <= positions_RW[..., None]
        mask: Any = causal[:, None]
        if self._window is not None:
            windowed = (causal & (keys > positions_RW[..., None] - self._window))[:, None]
            # Families with mixed layers take one mask a layer type, the others take one for all.
            mask = {"full_attention": mask, "sliding_attention": windowed} if self._mixed else windowed
        with self._recording(tap_ids) as taps:
            final = self._decoder(
                input_ids=tokens_RW,
                attention_mask=mask,
                position_ids=positions_RW,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return States(_stacked(taps, tap_ids, final), final)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        logits = head_logits(final, self.head_VE).float()
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    @torch.no_grad()
    def greedy(self, final_TE: Tensor) -> Tensor:
        parts = [self.logits(part).argmax(dim=-1) for part in final_TE.split(GREEDY_ROWS)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def prove(self) -> None:
        """Compare our pass, our cached loop over ragged rows and our head with the model's own forward.

        Raises:
            InputError: the family does something between embedding and logits that this class does not know.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.identity.vocab_size, (2, 9), generator=generator).to(self.device)
        wanted = self.model(tokens, use_cache=False).logits.float()
        whole = torch.stack([self.logits(states.final) for states in self.states(list(tokens), [])])
        cache = self.cache(2)
        self.extend(cache, tokens[:, :4], [])
        cache.kv.commit(torch.tensor([2, 3], device=self.device))
        ragged = torch.stack([tokens[0, 2:7], tokens[1, 3:8]])
        cached = self.logits(self.extend(cache, ragged, []).final)
        wanted_cached = torch.stack([wanted[0, 2:7], wanted[1, 3:8]])
        bound = (1e-3 if self.dtype == torch.float32 else 6e-2) * float(wanted.abs().max())
        error = max(float((whole - wanted).abs().max()), float((cached - wanted_cached).abs().max()))
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


def _stacked(taps: dict[int, Tensor], tap_ids: Sequence[int], final: Tensor) -> Tensor:
    if not tap_ids:
        return final.new_empty(*final.shape[:-1], 0, final.shape[-1])
    return torch.stack([taps[tap] for tap in tap_ids], dim=-2)
