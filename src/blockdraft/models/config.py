"""What a draft is built from, and the presets that the literature has names for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from blockdraft.choices import ConfidenceHead, ContextFusion, ContextKV, SequentialHead, words
from blockdraft.errors import InputError

# The sockets that give a method its name; a draft is one class whatever they say.
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dflash": MappingProxyType(
            {
                "context_fusion": "projected",
                "context_kv": "shared",
                "sequential_head": "none",
                "confidence_head": "none",
                "confidence_with_previous": False,
                "sample_from_anchor": False,
            }
        ),
        "dflare": MappingProxyType(
            {
                "context_fusion": "layerwise",
                "context_kv": "separate",
                "sequential_head": "none",
                "confidence_head": "none",
                "confidence_with_previous": False,
                "sample_from_anchor": False,
            }
        ),
        "dspark": MappingProxyType(
            {
                "context_fusion": "projected",
                "context_kv": "shared",
                "sequential_head": "markov",
                "confidence_head": "linear",
                "confidence_with_previous": True,
                "sample_from_anchor": True,
            }
        ),
    }
)

# Far beyond any model: a number above these is damage, and tensors of such shapes cannot even be described.
_LARGEST = {
    "hidden_size": 2**24, "num_layers": 2**16, "num_heads": 2**16, "num_kv_heads": 2**16, "head_dim": 2**16,
    "intermediate_size": 2**28, "vocab_size": 2**28, "block_size": 2**16, "max_position_embeddings": 2**40,
}  # fmt: skip
MIXTURE = "blockdraft"  # the method's name when the sockets are nobody's preset


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """Shape and sockets of a BlockDraft. Everything is stated; defaults live in `settings`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    """Rows of the verifier's embedding and head."""
    draft_vocab_size: int
    """Tokens that the draft can propose; `vocab_size`, or less with a map."""
    tap_ids: tuple[int, ...]
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
    standardise_taps: bool
    """Whether taps are standardised before fusion (calibrated once on the data)."""
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
            self.num_heads % self.num_kv_heads == 0,
            "num_key_value_heads",
            self.num_kv_heads,
            f"must divide the {self.num_heads} query heads",
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
        taps = list(self.tap_ids)
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
    def num_proposed(self) -> int:
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
        """The literature's name for these sockets, or MIXTURE.

        Projected fusion with shared keys is DSpark as soon as it has a head of its own or samples from the anchor.
        """
        fused = (self.context_fusion, self.context_kv)
        extended = self.sequential_head != "none" or self.confidence_head != "none" or self.sample_from_anchor
        if not self.uniform:
            return MIXTURE
        if fused == ("projected", "shared"):
            return "dspark" if extended else "dflash"
        return "dflare" if fused == ("layerwise", "separate") and not extended else MIXTURE


def _require(condition: bool, field: str, value: object, remedy: str) -> None:
    if not condition:
        raise InputError("--" + field.replace("_", "-"), value, remedy)
