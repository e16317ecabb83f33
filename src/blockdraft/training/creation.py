"""A fresh draft and its contract, from settings, a verifier and the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockdraft.contract import CONTRACT_VERSION, TAP_CONVENTION, TAP_KIND, Contract
from blockdraft.errors import InputError
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.config import METHODS, DraftConfig, method_of
from blockdraft.records import Document
from blockdraft.runtime import dtype_name
from blockdraft.settings import DEFAULT_NUM_TAPS, TrainSettings
from blockdraft.training.states import InProcessStates
from blockdraft.verifiers.base import Verifier

CALIBRATION_DOCUMENTS = 32


def spread_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Default taps: `num_taps` depths spread evenly from after layer 2 to after layer n - 2.

    The rule of the published DFlash drafts (round(1 + i (n - 4) / (T - 1)) as an index of a layer), in our numbering.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    deepest = max(num_layers - 4, 0)
    return tuple(sorted({round(1 + i * deepest / (num_taps - 1)) + 1 for i in range(num_taps)}))


def draft_config(settings: TrainSettings, verifier: Verifier, documents: Sequence[Document]) -> DraftConfig:
    """Resolve every open choice of `settings`, refusing what does not fit verifier or data."""
    num_layers = verifier.identity.num_layers
    preset = METHODS[settings.speculator_type]
    fusion = settings.context_fusion or preset["context_fusion"]
    num_taps = settings.num_taps or DEFAULT_NUM_TAPS.get(fusion, 1)
    taps = settings.target_layer_ids or spread_taps(num_layers, num_taps)
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise InputError("--target-layer-ids", tap, f"must be in 0..{num_layers} (0 is the embeddings)")
    shape = verifier.layer_shape()
    # A verifier may rotate part of a head; a draft rotates all of it, and must say so to whoever serves it.
    rope = {key: value for key, value in verifier.rope_parameters().items() if key != "partial_rotary_factor"}
    return DraftConfig(
        hidden_size=verifier.identity.hidden_size,
        num_layers=settings.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=shape.rms_norm_eps,
        vocab_size=verifier.identity.vocab_size,
        tap_ids=tuple(taps),
        context_fusion=fusion,
        context_kv=settings.context_kv or preset["context_kv"],
        standardise_taps=settings.standardise_taps,
        block_size=settings.block_size,
        mask_token_id=resolve_mask_token(settings.mask_token_id, verifier, documents),
        embedding_scale=1.0,
        rope_parameters=rope,
        max_position_embeddings=verifier.context_length,
        windows=(None,) * settings.num_layers,
        causal=(False,) * settings.num_layers,
    )


def resolve_mask_token(asked: int | None, verifier: Verifier, documents: Sequence[Document]) -> int:
    """The token that stands in empty slots; it must never occur in the data.

    Asked for, else the tokenizer's mask token, else a row of the embedding that the tokenizer does not use. Never the
    padding or end token unasked, and nothing is ever added to the tokenizer.
    """
    tokenizer = verifier.tokenizer
    seen = {token for document in documents for token in document.input_ids}
    if asked is None:
        asked = tokenizer.mask_token_id
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


def make_contract(config: DraftConfig, verifier: Verifier) -> Contract:
    """The contract of a draft trained with this verifier."""
    standardisation = "none"
    if config.standardise_taps:
        standardisation = "folded" if config.context_fusion == "projected" else "explicit"
    return Contract(
        version=CONTRACT_VERSION,
        method=method_of(config.context_fusion, config.context_kv),
        context_fusion=config.context_fusion,
        context_kv=config.context_kv,
        verifier=verifier.identity,
        tap_ids=config.tap_ids,
        tap_convention=TAP_CONVENTION,
        tap_kind=TAP_KIND,
        tap_standardisation=standardisation,
        final_norm=verifier.final_norm,
        logit_softcap=verifier.logit_softcap,
        embedding_scale=config.embedding_scale,
        mask_token_id=config.mask_token_id,
        sample_from_anchor=False,
        block_size=config.block_size,
        default_k=config.num_proposed,
        windows=config.windows,
        causal=config.causal,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        draft_vocab_size=config.vocab_size,
        vocab_map_hash=None,
        compute_dtype=dtype_name(verifier.dtype),
    )


def create_draft(config: DraftConfig, verifier: Verifier, states: InProcessStates, seed: int) -> BlockDraft:
    """A draft with fresh float32 weights and calibrated taps, sharing the verifier's tables."""
    draft = BlockDraft(config).to(verifier.device)
    draft.borrow(verifier.embedding_VE, verifier.head_VE)
    draft.initialise(seed)
    if draft.fusion.statistics is not None:
        draft.fusion.statistics.calibrate(states.sample_taps(CALIBRATION_DOCUMENTS))
    return draft
