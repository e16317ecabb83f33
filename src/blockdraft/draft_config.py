"""The one description of a draft: its shape and its components."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from blockdraft.choices import ConfidenceHead, ContextFusion, ContextKV, SequentialHead, words
from blockdraft.errors import InputError
from blockdraft.presets import CUSTOM, Components, preset_of

# Far beyond any model: a number above these is damage, and tensors of such shapes cannot even be described.
_LARGEST = {
    "hidden_size": 2**24, "num_layers": 2**16, "num_attention_heads": 2**16, "num_key_value_heads": 2**16,
    "head_dim": 2**16, "intermediate_size": 2**28, "vocab_size": 2**28, "block_size": 2**16,
    "max_position_embeddings": 2**40,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Shape and components of a BlockDraft.

    A field that a draft setting has the name of takes its value (`training.creation`). Everything is stated; defaults
    live in `settings`. A default here is what checkpoints from before the field are.
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    """Rows of the verifier's embedding and head."""
    draft_vocab_size: int
    """Tokens that the draft can propose; `vocab_size`, or less with a map."""
    target_layer_ids: tuple[int, ...]
    """Ascending; tap i is the residual stream after i verifier layers."""
    context_fusion: str
    context_kv: str
    sequential_head: str
    """Correction of each slot's logits by the token before it: none, markov, gated or rnn (DSpark)."""
    markov_rank: int
    """Width of the sequential head's token embedding; 0 without such a head."""
    confidence_head: str
    """Estimate of a slot's chance to be accepted: none or linear."""
    confidence_with_previous: bool
    """Whether the confidence head also sees the embedding of the token before the slot."""
    sample_from_anchor: bool
    """True: slot k proposes the token behind it, the anchor's slot too. False: mask slots fill themselves in."""
    standardize_taps: bool
    """Whether taps are standardized before fusion (calibrated once on the data)."""
    block_size: int
    mask_token_id: int
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    """By layer: a slot at position p sees nothing at or before p - window; None sees all."""
    causal: tuple[bool, ...]
    """By layer: whether a slot sees only the slots up to itself."""

    def __post_init__(self) -> None:
        for field, choice in (
            ("context_fusion", ContextFusion),
            ("context_kv", ContextKV),
            ("sequential_head", SequentialHead),
            ("confidence_head", ConfidenceHead),
        ):
            value = getattr(self, field)
            _require(value in words(choice), field, value, f"choose one of {', '.join(words(choice))}")
        for field, most in _LARGEST.items():
            inside = 1 <= getattr(self, field) <= most
            _require(inside, field, getattr(self, field), f"must be in 1..{most:,}")
        eps = self.rms_norm_eps
        _require(0 <= eps < 1, "rms_norm_eps", eps, "must be 0 or more and under 1")
        _require(self.block_size >= 2, "block_size", self.block_size, "must be 2 or more: an anchor and a slot")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"must divide the {self.num_attention_heads} query heads",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even, since rotary embedding turns pairs")
        self._check_taps_and_tokens()
        self._check_heads()
        for field in ("windows", "causal"):
            entries = getattr(self, field)
            _require(len(entries) == self.num_layers, field, entries, f"needs one entry a layer, {self.num_layers}")
        for window in self.windows:
            _require(
                window is None or window > self.block_size,
                "sliding_window",
                window,
                f"must be larger than the block size, {self.block_size}",
            )

    def _check_taps_and_tokens(self) -> None:
        taps = list(self.target_layer_ids)
        _require(
            bool(taps) and taps == sorted(set(taps)), "target_layer_ids", taps, "must be ascending, without repetition"
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"must be in 0..{self.vocab_size - 1}",
        )
        _require(
            1 <= self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"must be in 1..{self.vocab_size}, the verifier's vocabulary",
        )

    def _check_heads(self) -> None:
        if self.sequential_head == "none":
            _require(self.markov_rank == 0, "markov_rank", self.markov_rank, "must be 0 without a sequential head")
            _require(
                not self.confidence_with_previous,
                "confidence_with_previous",
                True,
                "needs a sequential head, whose token embedding it reads",
            )
        else:
            inside = 1 <= self.markov_rank <= 2**16
            _require(inside, "markov_rank", self.markov_rank, "must be in 1..65,536")
        if self.confidence_head == "none":
            _require(not self.confidence_with_previous, "confidence_with_previous", True, "needs a confidence head")

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens that a block of the trained size proposes."""
        return self.block_size - self.first_predicted

    @property
    def first_predicted(self) -> int:
        """The first slot that proposes a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def reduced(self) -> bool:
        """Whether the draft can propose only part of the verifier's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def uniform(self) -> bool:
        """Whether all layers share causality, and all sliding ones their window: what the shared format can state."""
        return len(set(self.causal)) == 1 and len({window for window in self.windows if window is not None}) <= 1

    @property
    def method(self) -> str:
        """The preset's name for these components, or CUSTOM."""
        return preset_of(Components.of(self)) if self.uniform else CUSTOM

    @property
    def exported(self) -> DraftConfig:
        """The same draft as a file holds it: the standardization of a projection is folded into its weight."""
        folded = self.standardize_taps and self.context_fusion == "projected"
        return dataclasses.replace(self, standardize_taps=False) if folded else self


def _require(condition: bool, field: str, value: object, hint: str) -> None:
    if not condition:
        raise InputError("--" + field.replace("_", "-"), value, hint)
