"""What every verifier offers, whatever the model behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from blockdraft.contract import VerifierIdentity
from blockdraft.ops.ragged_kv import RaggedKV


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states of some positions.

    Attributes:
        taps: residual stream after each tapped number of layers, [..., L, E], in ascending order of tap id.
        final: the stream after the last layer and the final norm, ready for the output head, [..., E].
    """

    taps: Tensor
    final: Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Widths of a decoder layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float


Sources = Sequence[Sequence[int] | None]
"""What the encoder reads for each row; empty, or None for every row, where the verifier has no encoder."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Where the tokens of a prompt go.

    Attributes:
        decoder: what the reply is decoded behind.
        encoder: what the encoder reads; None where there is none.
    """

    decoder: list[int]
    encoder: list[int] | None = None


class VerifierCache(Protocol):
    """Opaque decoding state of a verifier; `kv.commit` decides what of the last step is kept."""

    kv: RaggedKV

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row that is not named in `rows` (indices, [R'])."""
        ...


class TrainingVerifier(Protocol):
    """What training reads of a frozen verifier: its identity, its tables and the final norm, none of its layers."""

    identity: VerifierIdentity
    tokenizer: Any
    head_VE: Tensor
    logit_softcap: float | None
    context_length: int
    """Positions of the decoder."""
    has_encoder: bool
    stop_ids: frozenset[int]

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def window(self) -> int | None:
        """Positions that sliding layers see; None where all layers see everything."""
        ...

    @property
    def device(self) -> torch.device: ...

    def layer_shape(self) -> LayerShape:
        """Shape of the verifier's own decoder layers, which a draft takes over."""
        ...

    def rope_parameters(self) -> dict[str, Any]:
        """One flat rotary dictionary (rope_type, rope_theta, scaling keys) that a draft can inherit."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., E] of token ids as a draft sees them: what an engine that serves the pair shares with it."""
        ...

    def sides(self, prompt: Sequence[int], name: str) -> Sides:
        """Divide a prompt between encoder and decoder.

        Raises:
            InputError: it is empty, leaves no room for a reply, or cannot be read; `name` says which prompt it is.
        """
        ...

    def normed(self, raw: Tensor) -> Tensor:
        """`States.final` [..., E] of raw outputs of the last layer, the tap after all layers, [..., E]."""
        ...

    def logits(self, final: Tensor) -> Tensor:
        """float32 logits [..., V] of states that have gone through the final norm, soft cap included."""
        ...

    def greedy(self, final_TE: Tensor) -> Tensor:
        """The verifier's own next token after each position, int64 [T], without holding [T, V] logits."""
        ...


class Verifier(TrainingVerifier, Protocol):
    """A frozen target model, driven one forward pass at a time."""

    def states(
        self, sequences: Sequence[Tensor], target_layer_ids: Sequence[int], sources: Sources = ()
    ) -> list[States]:
        """One pass over whole token sequences of the decoder; each result covers its sequence alone."""
        ...

    def cache(self, num_rows: int, sources: Sources = ()) -> VerifierCache:
        """A decoding cache without any position of the decoder."""
        ...

    def prove(self) -> None:
        """Reject a model whose own forward gives other logits than this interface does."""
        ...

    def extend(self, cache: VerifierCache, tokens_RW: Tensor, target_layer_ids: Sequence[int]) -> States:
        """Run `tokens_RW` behind the committed positions of each row, without committing them.

        Returns taps [R, W, L, E] and final [R, W, E].
        """
        ...


def whole(verifier: TrainingVerifier) -> Verifier:
    """The verifier as one that runs its layers; only for code that is never given parts alone."""
    assert hasattr(verifier, "states"), "these are parts of a verifier"
    return cast(Verifier, verifier)
