"""What a draft is built from, and the presets that the literature has names for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from blockdraft.errors import InputError

CONTEXT_FUSIONS = ("projected", "layerwise")
CONTEXT_KVS = ("shared", "separate")
STANDARDISATIONS = ("none", "folded", "explicit")

# The sockets that give a method its name; a draft is one class whatever they say.
METHODS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dflash": MappingProxyType({"context_fusion": "projected", "context_kv": "shared"}),
        "dflare": MappingProxyType({"context_fusion": "layerwise", "context_kv": "separate"}),
    }
)


MIXTURE = "blockdraft"  # the method's name when the sockets are nobody's preset


def method_of(context_fusion: str, context_kv: str) -> str:
    """The literature's name for a combination of sockets, or MIXTURE."""
    sockets = {"context_fusion": context_fusion, "context_kv": context_kv}
    return next((name for name, preset in METHODS.items() if dict(preset) == sockets), MIXTURE)


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
    tap_ids: tuple[int, ...]
    """Ascending; tap i is the residual stream after i verifier layers."""
    context_fusion: str
    context_kv: str
    standardise_taps: bool
    """Whether taps are standardised before fusion (calibrated once on the data)."""
    block_size: int
    mask_token_id: int
    embedding_scale: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.context_fusion not in CONTEXT_FUSIONS:
            raise InputError("--context-fusion", self.context_fusion, f"choose one of {', '.join(CONTEXT_FUSIONS)}")
        if self.context_kv not in CONTEXT_KVS:
            raise InputError("--context-kv", self.context_kv, f"choose one of {', '.join(CONTEXT_KVS)}")
        if self.block_size < 2:
            raise InputError("--block-size", self.block_size, "a block has an anchor and at least one slot: 2 or more")
        if self.num_layers < 1:
            raise InputError("--num-layers", self.num_layers, "must be 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise InputError("num_kv_heads", self.num_kv_heads, f"must divide the {self.num_heads} query heads")
        if self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "must be even, since rotary embedding turns pairs")
        if list(self.tap_ids) != sorted(set(self.tap_ids)) or not self.tap_ids:
            raise InputError("--target-layer-ids", list(self.tap_ids), "must be ascending and without repetition")
        for name in ("windows", "causal"):
            if len(getattr(self, name)) != self.num_layers:
                raise InputError(name, getattr(self, name), f"needs one entry for each of {self.num_layers} layers")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError("--mask-token-id", self.mask_token_id, f"must be in 0..{self.vocab_size - 1}")

    @property
    def num_proposed(self) -> int:
        """Tokens that a block of the trained size proposes."""
        return self.block_size - 1
