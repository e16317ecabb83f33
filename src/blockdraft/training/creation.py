"""A fresh draft and its contract, from settings, a verifier and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blockdraft.contract import CONTRACT_VERSION, Contract
from blockdraft.data.vocabulary import choose_vocabulary, coverage, occurring_tokens, token_counts
from blockdraft.draft_config import DraftConfig
from blockdraft.errors import InputError
from blockdraft.losses.objective import Objective, parse_loss
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.vocabulary import map_digest
from blockdraft.presets import PRESETS, component_names
from blockdraft.progress import say
from blockdraft.records import Example
from blockdraft.runtime import dtype_name
from blockdraft.settings import DEFAULT_NUM_TAPS, DraftSettings, ObjectiveSettings, TrainSettings
from blockdraft.training.hidden_states import TrainingStates
from blockdraft.verifiers.base import TrainingVerifier

CALIBRATION_EXAMPLES = 32
DEFAULT_ROPE_THETA = 10_000.0  # for verifiers without rotary positions
# What transformers' rotary types read for one position of a token and a whole head; sections and parts are left out.
ROTARY_KEYS = (
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip
WHOLE_HEAD_TYPES = frozenset({"mrope", "proportional"})  # "default" as soon as a head is rotated whole


def spread_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Default taps: `num_taps` depths spread evenly from after layer 2 to after layer n - 2.

    The rule of the published DFlash drafts (round(1 + i (n - 4) / (T - 1)) as an index of a layer), in our numbering.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    deepest = max(num_layers - 4, 0)
    return tuple(sorted({round(1 + i * deepest / (num_taps - 1)) + 1 for i in range(num_taps)}))


def draft_config(settings: TrainSettings, verifier: TrainingVerifier, examples: Sequence[Example]) -> DraftConfig:
    """Resolve every open choice of `settings`, rejecting what does not fit verifier or data."""
    depth, vocab_size = verifier.identity.num_layers, verifier.identity.vocab_size
    components = resolve_components(settings)
    taps = choose_taps(settings, components["context_fusion"], depth)
    for tap in taps:
        if not 0 <= tap <= depth:
            raise InputError("--target-layer-ids", tap, f"must be in 0..{depth} (0 is the embeddings)")
    if (settings.draft_vocab_size or 0) > vocab_size:
        say(f"draft vocabulary: all {vocab_size:,} tokens of the verifier, which has no {settings.draft_vocab_size:,}")
    resolved = {
        "hidden_size": verifier.identity.hidden_size,
        **_widths(settings, verifier),
        "rms_norm_eps": verifier.layer_shape().rms_norm_eps,
        "vocab_size": vocab_size,
        "draft_vocab_size": min(vocab_size, settings.draft_vocab_size or vocab_size),
        "target_layer_ids": tuple(taps),
        **components,
        "markov_rank": 0 if components["sequential_head"] == "none" else settings.markov_rank,
        "mask_token_id": resolve_mask_token(settings.mask_token_id, verifier, examples),
        "rope_parameters": draft_rotary(verifier.rope_parameters()),
        "max_position_embeddings": verifier.context_length,
        **layer_kinds(settings),
    }
    described = {field.name for field in dataclasses.fields(DraftConfig)}
    same = {field.name for field in dataclasses.fields(DraftSettings)} & described
    return DraftConfig(**{**{name: getattr(settings, name) for name in same}, **resolved})


def draft_rotary(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a draft, from its verifier's.

    A verifier may rotate part of a head, or sections of it by several positions (images); a draft rotates all of it by
    one, and must not say otherwise to whoever serves it.
    """
    kept = {key: value for key, value in parameters.items() if key in ROTARY_KEYS}
    if kept.get("rope_type") in WHOLE_HEAD_TYPES:
        kept["rope_type"] = "default"
    return {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA, **kept}


def choose_taps(settings: DraftSettings, context_fusion: str, num_layers: int) -> tuple[int, ...]:
    """Taps as they are named, as shares of the depth, or spread; depths that fall together are one tap."""
    named = [name for name in ("target_layer_ids", "tap_depths") if getattr(settings, name)]
    if len(named) > 1:
        raise InputError("--tap-depths", list(settings.tap_depths), "give these or --target-layer-ids, not both")
    if settings.tap_depths:
        return tuple(sorted({round(depth * num_layers) for depth in settings.tap_depths}))
    return settings.target_layer_ids or spread_taps(
        num_layers, settings.num_taps or DEFAULT_NUM_TAPS.get(context_fusion, 1)
    )


def resolve_components(settings: DraftSettings) -> dict[str, Any]:
    """The type's preset with every component that was named replaced.

    The preset's wish that the confidence head sees the token before a slot falls away with either head.
    """
    preset = PRESETS[settings.speculator_type].components
    given = {name: getattr(settings, name) for name in component_names()}
    chosen = {name: getattr(preset, name) if value is None else value for name, value in given.items()}
    if given["confidence_with_previous"] is None and "none" in (chosen["sequential_head"], chosen["confidence_head"]):
        chosen["confidence_with_previous"] = False
    return chosen


def layer_kinds(settings: DraftSettings) -> dict[str, tuple]:
    """Window and in-block causality of every layer.

    As trainers of this family have it, sliding layers are causal inside the block unless told otherwise, and full
    ones are not.
    """
    full = set(settings.full_attention_indices)
    sliding = [settings.sliding_window is not None and layer not in full for layer in range(settings.num_layers)]
    return {
        "windows": tuple(settings.sliding_window if slides else None for slides in sliding),
        "causal": tuple(
            settings.causal_block or (slides and not settings.sliding_window_non_causal) for slides in sliding
        ),
    }


def _widths(settings: DraftSettings, verifier: TrainingVerifier) -> dict[str, Any]:
    """Heads and widths: the verifier's unless given. Heads without a width of their own divide the hidden size."""
    shape, hidden = verifier.layer_shape(), verifier.identity.hidden_size
    heads = settings.num_attention_heads or shape.num_heads
    head_dim = settings.head_dim or shape.head_dim
    if settings.num_attention_heads and not settings.head_dim:
        if hidden % heads:
            raise InputError(
                "--num-attention-heads", heads, f"does not divide the hidden size {hidden}; give --head-dim as well"
            )
        head_dim = hidden // heads
    kv_heads = settings.num_key_value_heads
    if kv_heads is None:
        kv_heads = shape.num_kv_heads if heads % shape.num_kv_heads == 0 else heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": settings.intermediate_size or shape.intermediate_size,
    }


def make_objective(settings: ObjectiveSettings, speculator_type: str) -> Objective:
    """The objective that the settings name, with the type's defaults.

    Raises:
        InputError: D-PACE was asked for with another loss than cross entropy.
    """
    terms = parse_loss(settings.loss_fn or PRESETS[speculator_type].loss)
    weighting = settings.per_position_loss_weight or ("dpace" if set(terms) == {"ce"} else "fixed-exp-decay")
    return Objective(
        terms=terms,
        weighting=weighting,
        dpace_alpha=settings.dpace_alpha,
        decay_gamma=settings.decay_gamma,
        decay_gamma_end=settings.decay_gamma_end,
        confidence_alpha=settings.confidence_head_alpha,
    )


def draft_vocabulary(config: DraftConfig, examples: Sequence[Example]) -> Tensor | None:
    """Verifier ids of a reduced vocabulary, from the replies; None for the full one. Says what it covers."""
    if not config.reduced:
        return None
    counts = token_counts(examples, config.vocab_size)
    ids = choose_vocabulary(counts, config.draft_vocab_size)
    seen = int((counts > 0).sum())
    filled = max(0, config.draft_vocab_size - seen)
    say(
        f"draft vocabulary: {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, "
        f"{coverage(counts, ids):.2%} of the reply tokens"
        + (f"; only {seen:,} tokens occur, the {filled:,} smallest other ids fill up" if filled else "")
    )
    return ids


def resolve_mask_token(asked: int | None, verifier: TrainingVerifier, examples: Sequence[Example]) -> int:
    """The token that stands in empty slots; it must never occur in the data.

    Asked for, else the tokenizer's mask token, else a row of the embedding that the tokenizer does not use. Never the
    padding or end token unasked, and nothing is ever added to the tokenizer.
    """
    tokenizer = verifier.tokenizer
    seen = occurring_tokens(examples)
    if asked is None:
        asked = tokenizer.mask_token_id
        if asked is not None and asked in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            raise InputError(
                "--mask-token-id",
                f"{asked} ({tokenizer.mask_token})",
                "the tokenizer's mask token is also its padding or end token; name another, or this one if you mean it",
            )
    if asked is None and len(tokenizer) < verifier.identity.vocab_size:
        asked = len(tokenizer)
    if asked is None:
        free = ", ".join(f"{index} ({token})" for index, token in free_control_tokens(tokenizer, seen)[:4])
        raise InputError(
            "--mask-token-id",
            "not given",
            "this tokenizer has no mask token and no unused row; name a token that never occurs in the data"
            + (f", such as {free}" if free else ""),
        )
    if not 0 <= asked < verifier.identity.vocab_size:
        raise InputError("--mask-token-id", asked, f"must be in 0..{verifier.identity.vocab_size - 1}")
    if asked in seen:
        raise InputError("--mask-token-id", asked, f"occurs in the data ({tokenizer.decode([asked])!r}); name another")
    return asked


def free_control_tokens(tokenizer: Any, seen: set[int]) -> list[tuple[int, str]]:
    """Control tokens of a tokenizer that do not occur in the data and are not padding or end."""
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id} | seen
    return [(i, str(token)) for i, token in sorted(tokenizer.added_tokens_decoder.items()) if i not in taken]


def make_contract(config: DraftConfig, verifier: TrainingVerifier, vocabulary: Tensor | None = None) -> Contract:
    """The contract of a draft trained with this verifier.

    Args:
        vocabulary: verifier ids of a reduced vocabulary.
    """
    assert config.reduced == (vocabulary is not None)
    return Contract(
        version=CONTRACT_VERSION,
        verifier=verifier.identity,
        logit_softcap=verifier.logit_softcap,
        draft=config.exported,
        vocab_map_hash=None if vocabulary is None else map_digest(vocabulary, config.vocab_size),
        compute_dtype=dtype_name(verifier.dtype),
    )


def create_draft(
    config: DraftConfig, verifier: TrainingVerifier, states: TrainingStates, seed: int, vocabulary: Tensor | None = None
) -> BlockDraft:
    """A draft with fresh float32 weights and calibrated taps, sharing the verifier's tables."""
    draft = BlockDraft(config).to(verifier.device)
    if draft.vocabulary is not None and vocabulary is not None:
        draft.vocabulary.keep(vocabulary.to(verifier.device))
    draft.share(verifier.embed, verifier.head_VE)
    draft.initialise(seed)
    if draft.fusion.statistics is not None:
        draft.fusion.statistics.calibrate(states.sample_taps(CALIBRATION_EXAMPLES))
    return draft
