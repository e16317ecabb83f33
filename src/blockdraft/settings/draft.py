"""Settings of a new draft: its sockets and shape, and what it is trained towards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockdraft.settings.base import at_least, check, one_of, setting

# A projection's width grows with its taps; a mixture costs nothing to widen, and DFlare's published drafts use more.
DEFAULT_NUM_TAPS = {"projected": 5, "layerwise": 8}
# DSpark's published drafts learn the verifier's distribution; the others learn its tokens.
DEFAULT_LOSS = {"dspark": '{"ce": 0.1, "tv": 0.9}'}
_BY_TYPE = "default: what the type names"


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Sockets and shape of a new draft. What is not given follows the type's preset, the verifier or the data."""

    PANEL: ClassVar[str] = "The draft: sockets and shape"

    speculator_type: str = setting("dflash", "dflash, dflare or dspark: a preset of the sockets below")
    context_fusion: str | None = setting(None, f"projected or layerwise; {_BY_TYPE}")
    context_kv: str | None = setting(None, f"shared or separate context projections; {_BY_TYPE}")
    sequential_head: str | None = setting(None, f"none, markov, gated or rnn; {_BY_TYPE}")
    markov_rank: int = setting(256, "width of the sequential head's token embedding")
    confidence_head: str | None = setting(None, f"none or linear; {_BY_TYPE}")
    confidence_with_previous: bool | None = setting(
        None, f"the confidence head also sees the token before the slot; {_BY_TYPE}"
    )
    sample_from_anchor: bool | None = setting(
        None, f"every slot, the anchor's too, proposes the token behind it; {_BY_TYPE}"
    )
    num_layers: int = setting(2, "draft layers")
    block_size: int = setting(8, "slots of a block, the anchor included")
    num_attention_heads: int | None = setting(None, "query heads; default: the verifier's")
    num_key_value_heads: int | None = setting(None, "key/value heads; default: the verifier's")
    head_dim: int | None = setting(None, "width of a head; default: hidden size / heads if heads are given")
    intermediate_size: int | None = setting(None, "width of the feed-forward layers; default: the verifier's")
    target_layer_ids: tuple[int, ...] = setting(
        (), "taps: residual stream after so many verifier layers; default: spread over the depth"
    )
    tap_depths: tuple[float, ...] = setting(
        (), "taps as shares of the verifier's depth, for recipes of verifiers of several sizes; 0.5 is half way"
    )
    num_taps: int | None = setting(
        None, "how many taps to spread without --target-layer-ids; default: 5 for projected fusion, 8 for layerwise"
    )
    standardise_taps: bool = setting(True, "remove each tap's mean direction and scale, measured on the data")
    mask_token_id: int | None = setting(None, "token that stands in empty slots; must not occur in the data")
    draft_vocab_size: int | None = setting(
        None, "propose at most so many tokens, those most frequent in the replies; default: the verifier's vocabulary"
    )
    sliding_window: int | None = setting(None, "sliding layers see so many positions back from each slot")
    full_attention_indices: tuple[int, ...] = setting((), "layers that see the whole context despite --sliding-window")
    sliding_window_non_causal: bool = setting(
        False, "slots of sliding layers see their whole block, not only what is before them"
    )
    causal_block: bool = setting(False, "slots see only what is before them in the block, in every layer")

    def __post_init__(self) -> None:
        one_of(self, "speculator_type", ("dflash", "dflare", "dspark"))
        at_least(self, 1, "num_layers", "markov_rank")
        at_least(self, 2, "block_size")
        for name in ("num_taps", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                     "draft_vocab_size", "sliding_window"):  # fmt: skip
            value = getattr(self, name)
            check(value is None or value > 0, name, value, "must be 1 or more")
        for depth in self.tap_depths:
            check(0 <= depth <= 1, "tap_depths", depth, "must be between 0 (the embeddings) and 1 (the last layer)")
        for name in ("full_attention_indices", "sliding_window_non_causal"):
            given = getattr(self, name)
            check(self.sliding_window is not None or not given, name, given, "needs --sliding-window")
        for index in self.full_attention_indices:
            inside = 0 <= index < self.num_layers
            check(inside, "full_attention_indices", index, f"layers are 0..{self.num_layers - 1}")
        both = self.causal_block and self.sliding_window_non_causal
        check(not both, "causal_block", True, "contradicts --sliding-window-non-causal; give one of them")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What a draft is trained towards."""

    PANEL: ClassVar[str] = "Objective"

    loss_fn: str | None = setting(
        None,
        "ce, kl, rkl, jsd, tv, nla, lk_hybrid, or weights as JSON; default: ce, for dspark " + DEFAULT_LOSS["dspark"],
    )
    per_position_loss_weight: str | None = setting(
        None, "dpace (with ce alone), fixed-exp-decay or progressive-decay; default: dpace where it is defined"
    )
    dpace_alpha: float = setting(0.5, "smoothing of D-PACE, in (0, 1]")
    decay_gamma: float = setting(4.0, "slots over which the weight falls by e (progressive: at the start)")
    decay_gamma_end: float = setting(10.5, "the same at the end of a progressive decay")
    confidence_head_alpha: float = setting(1.0, "weight of the confidence head's term")

    def __post_init__(self) -> None:
        weighting = self.per_position_loss_weight
        known = ("dpace", "fixed-exp-decay", "progressive-decay")
        field = "per_position_loss_weight"
        check(weighting is None or weighting in known, field, weighting, f"choose one of {', '.join(known)}")
        for name in ("decay_gamma", "decay_gamma_end"):
            check(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        check(0 < self.dpace_alpha <= 1, "dpace_alpha", self.dpace_alpha, "must be above 0 and at most 1")
        at_least(self, 0, "confidence_head_alpha")
