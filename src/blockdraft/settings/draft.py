"""Settings of a new draft: its components and shape, and what it is trained towards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockdraft.choices import ConfidenceHead, ContextFusion, ContextKV, SequentialHead, Weighting
from blockdraft.presets import PRESETS, SpeculatorType
from blockdraft.settings.base import Settings, check, setting

# A projection's width grows with its taps; a mixture costs nothing to widen, and DFlare's published drafts use more.
DEFAULT_NUM_TAPS = {"projected": 5, "layerwise": 8}
_BY_TYPE = "default: what the type names"


def _losses() -> str:
    """The losses of the presets: the usual one, and who has another."""
    usual = next(iter(PRESETS.values())).loss
    return "; ".join([usual, *(f"for {name} {p.loss}" for name, p in PRESETS.items() if p.loss != usual)])


@dataclass(frozen=True, kw_only=True)
class DraftSettings(Settings):
    """Components and shape of a new draft. What is not given follows the type's preset, the verifier or the data."""

    PANEL: ClassVar[str] = "The draft: components and shape"

    speculator_type: SpeculatorType = setting("dflash", f"a preset of the components below: {', '.join(PRESETS)}")
    context_fusion: ContextFusion | None = setting(None, f"projected or layerwise; {_BY_TYPE}")
    context_kv: ContextKV | None = setting(None, f"shared or separate context projections; {_BY_TYPE}")
    sequential_head: SequentialHead | None = setting(None, f"none, markov, gated or rnn; {_BY_TYPE}")
    markov_rank: int = setting(256, "width of the sequential head's token embedding", at_least=1, at_most=65536)
    confidence_head: ConfidenceHead | None = setting(None, f"none or linear; {_BY_TYPE}")
    confidence_with_previous: bool | None = setting(
        None, f"the confidence head also sees the token before the slot; {_BY_TYPE}"
    )
    sample_from_anchor: bool | None = setting(
        None, f"every slot, the anchor's too, proposes the token behind it; {_BY_TYPE}"
    )
    num_layers: int = setting(5, "draft layers", at_least=1, at_most=512)
    block_size: int = setting(8, "slots of a block, the anchor included", at_least=2, at_most=1024)
    num_attention_heads: int | None = setting(None, "query heads; default: the verifier's", at_least=1, at_most=65536)
    num_key_value_heads: int | None = setting(
        None, "key/value heads; default: the verifier's", at_least=1, at_most=65536
    )
    head_dim: int | None = setting(
        None, "width of a head; default: hidden size / heads if heads are given", at_least=1, at_most=65536
    )
    intermediate_size: int | None = setting(
        None, "width of the feed-forward layers; default: the verifier's", at_least=1, at_most=2**24
    )
    target_layer_ids: tuple[int, ...] = setting(
        (), "taps: residual stream after so many verifier layers; default: spread over the depth", at_least=0
    )
    tap_depths: tuple[float, ...] = setting(
        (),
        "taps as shares of the verifier's depth, for recipes of verifiers of several sizes; 0.5 is half way",
        at_least=0,
        at_most=1,
    )
    num_taps: int | None = setting(
        None,
        "how many taps to spread without --target-layer-ids; default: 5 for projected fusion, 8 for layerwise",
        at_least=1,
        at_most=4096,
    )
    standardize_taps: bool = setting(
        True, "remove each tap's mean direction and scale, measured on the data", formerly="standardise_taps"
    )
    mask_token_id: int | None = setting(
        None, "token that stands in empty slots; must not occur in the data", at_least=0
    )
    draft_vocab_size: int | None = setting(
        None,
        "propose at most so many tokens, those most frequent in the replies; default: the verifier's vocabulary",
        at_least=1,
    )
    sliding_window: int | None = setting(None, "sliding layers see so many positions back from each slot", at_least=1)
    full_attention_indices: tuple[int, ...] = setting(
        (), "layers that see the whole context despite --sliding-window", at_least=0
    )
    sliding_window_non_causal: bool = setting(
        False, "slots of sliding layers see their whole block, not only what is before them"
    )
    causal_block: bool = setting(False, "slots see only what is before them in the block, in every layer")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("full_attention_indices", "sliding_window_non_causal"):
            given = getattr(self, name)
            check(self.sliding_window is not None or not given, name, given, "needs --sliding-window")
        for index in self.full_attention_indices:
            inside = 0 <= index < self.num_layers
            check(inside, "full_attention_indices", index, f"layers are 0..{self.num_layers - 1}")
        both = self.causal_block and self.sliding_window_non_causal
        check(not both, "causal_block", True, "contradicts --sliding-window-non-causal; give one of them")


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Settings):
    """What a draft is trained towards."""

    PANEL: ClassVar[str] = "Objective"

    loss_fn: str | None = setting(
        None,
        "ce, kl, rkl, jsd, tv, nla, lk_hybrid, or weights as JSON; default: " + _losses(),
    )
    per_position_loss_weight: Weighting | None = setting(
        None, "dpace (with ce alone), fixed-exp-decay or progressive-decay; default: dpace where it is defined"
    )
    dpace_alpha: float = setting(0.5, "smoothing of D-PACE, in (0, 1]", above=0, at_most=1)
    decay_gamma: float = setting(4.0, "slots over which the weight falls by e (progressive: at the start)", above=0)
    decay_gamma_end: float = setting(10.5, "the same at the end of a progressive decay", above=0)
    confidence_head_alpha: float = setting(1.0, "weight of the confidence head's term", at_least=0)
