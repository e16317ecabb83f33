"""config.json of earlier contract versions as that of the present one.

Written is the present version; read are it and the one before. As long as a step of this table suffices, older ones
are read too: each step makes a version the next.

1: windows were measured from the anchor, which no engine does. 2: windows move with the slot. 3: `embedding`.
4: `matrices_digest` and `revision`. 5: without `final_norm`, which nothing read. 6: the draft's config in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blockdraft.contract import CONTRACT_VERSION, Contract
from blockdraft.errors import InputError
from blockdraft.typed import checked

Json = dict[str, Any]

_UNCHANGED = ("verifier", "logit_softcap", "vocab_map_hash", "compute_dtype")
# Names in version 5 of what the draft's config has under another.
_RENAMED = {"tap_ids": "target_layer_ids"}
_KEPT = (
    "context_fusion", "context_kv", "sequential_head", "markov_rank", "confidence_head", "confidence_with_previous",
    "mask_token_id", "sample_from_anchor", "block_size", "windows", "causal", "rope_parameters",
    "max_position_embeddings", "draft_vocab_size",
)  # fmt: skip
_LAYER = {
    "hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
}  # fmt: skip
# What later versions do not state, since it could have one value only, or follows from the rest.
_FIXED = {"tap_convention": "after_layers", "tap_kind": "residual_stream"}
_STANDARDIZED = {"projected": ("none", "folded"), "layerwise": ("none", "explicit")}


def upgraded(raw: Json, key: str, where: str) -> Json:
    """A config.json with a contract of the present version under `key`; one that no step is for as it is.

    Raises:
        InputError: the contract lacks a field, or states what its version could not.
    """
    contract = raw[key]
    if not isinstance(contract, dict) or not isinstance(contract.get("verifier"), dict):
        return raw
    contract = {**contract, "verifier": dict(contract["verifier"])}
    while isinstance(contract.get("version"), int) and contract["version"] in _STEPS:
        contract = _STEPS[contract["version"]](contract, raw, where)
    return {**raw, key: contract}


def _from_3(contract: Json, raw: Json, where: str) -> Json:
    scale = contract.pop("embedding_scale", None)
    if scale != 1.0:
        raise InputError(f"{where} embedding_scale", scale, "must be 1.0; engines do not scale; train the draft again")
    return {**contract, "version": 4, "verifier": {**contract["verifier"], "revision": None, "matrices_digest": None}}


def _from_4(contract: Json, raw: Json, where: str) -> Json:
    contract.pop("final_norm", None)
    return {**contract, "version": 5}


def _from_5(contract: Json, raw: Json, where: str) -> Json:
    kept = {name: contract.pop(name) for name in _UNCHANGED if name in contract}
    for name in (*_KEPT, *_RENAMED):
        if name not in contract:
            raise InputError(f"{where} {name}", "missing", "the file is damaged")
    layer = checked(dict[str, Any], raw.get("transformer_layer_config"), f"{where}'s transformer_layer_config")
    draft = {
        **{name: contract.pop(name) for name in _KEPT},
        **{new: contract.pop(old) for old, new in _RENAMED.items()},
        **{name: layer.get(key) for name, key in _LAYER.items()},
        "vocab_size": kept["verifier"].get("vocab_size"),
        "standardize_taps": contract.get("tap_standardisation") == "explicit",
    }
    following = {name: contract.pop(name, None) for name in ("method", "default_k", "tap_standardisation", *_FIXED)}
    del contract["version"]
    present = {"version": CONTRACT_VERSION, **kept, "draft": draft, **contract}  # with what is unknown, to be rejected
    _require_following(Contract.from_dict(present, where), following, where)
    return present


def _require_following(contract: Contract, stated: Json, where: str) -> None:
    """Hold what version 5 stated although it follows from the rest against what follows."""
    draft = contract.draft
    wanted = {"method": (draft.method,), "default_k": (draft.num_speculative_tokens,),
              "tap_standardisation": _STANDARDIZED[draft.context_fusion],
              **{name: (value,) for name, value in _FIXED.items()}}  # fmt: skip
    for name, values in wanted.items():
        if stated[name] not in values:
            known = " or ".join(repr(value) for value in values)
            raise InputError(f"{where} {name}", stated[name], f"the rest of the checkpoint makes it {known}")


_STEPS: Mapping[int, Callable[[Json, Json, str], Json]] = {3: _from_3, 4: _from_4, 5: _from_5}
