"""config.json and tensor names of the Speculators format (version 0.9), with the contract under ``blockdraft``.

The format states some facts twice and the contract states most of them again. Reading does not pick one: the config
that these facts would be written as is made anew and compared, and any difference is refused by name.
"""

from __future__ import annotations

from typing import Any

from blockdraft.contract import Contract, upgraded
from blockdraft.errors import InputError
from blockdraft.files import reason
from blockdraft.models.config import MIXTURE, DraftConfig
from blockdraft.models.positions import RotaryPositions
from blockdraft.typed import checked

FORMAT_VERSION = "0.9.0"
CONTRACT_KEY = "blockdraft"
DIGEST = "blockdraft_digest"  # signs config and weights of one export (`store.digest`)
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflare": "DFlareDraftModel",
    "dspark": "DSparkDraftModel",
    MIXTURE: "BlockDraftModel",
}
MARKOV_TYPES = {"none": "vanilla", "markov": "vanilla", "gated": "gated", "rnn": "rnn"}

# Tensors whose name in the file is not their name in the module; all others are named alike.
FILE_NAMES = {
    "fusion.fc.weight": "fc.weight",
    "fusion.hidden_norm.weight": "hidden_norm.weight",
    "fusion.layer_fusion_weights": "layer_fusion_weights",
    "fusion.statistics.direction": "tap_direction",
    "fusion.statistics.scale": "tap_scale",
    "sequential.markov_w1.weight": "markov_head.markov_w1.weight",
    "sequential.markov_w2.weight": "markov_head.markov_w2.weight",
    "sequential.gate_proj.weight": "markov_head.gate_proj.weight",
    "sequential.gate_proj.bias": "markov_head.gate_proj.bias",
    "sequential.joint_proj.weight": "markov_head.joint_proj.weight",
    "sequential.joint_proj.bias": "markov_head.joint_proj.bias",
    "confidence.proj.weight": "confidence_head.proj.weight",
    "confidence.proj.bias": "confidence_head.proj.bias",
    "vocabulary.d2t": "d2t",
    "vocabulary.t2d": "t2d",
}
# Keys of the layer config that earlier exports do not have; each repeats what another key states.
ADDED = ("rope_theta", "rope_scaling", "use_sliding_window")
# What the layer config alone states.
_LAYER = {
    "hidden_size": int, "num_hidden_layers": int, "num_attention_heads": int, "num_key_value_heads": int,
    "head_dim": int, "intermediate_size": int, "rms_norm_eps": float,
}  # fmt: skip
HEAD = "lm_head.weight"  # rows of the verifier's head for a reduced vocabulary; engines need them in the file


def config_json(config: DraftConfig, contract: Contract, dtype: str) -> dict[str, Any]:
    """The config.json that vLLM and Speculators read, and we do."""
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    # The format has one window and one causality for all layers. A draft with more is a mixture, whose own statement
    # of both stands in the contract and which no engine takes for something else.
    windows = {window for window in config.windows if window is not None}
    return {
        "architectures": [ARCHITECTURES[contract.method]],
        "speculators_model_type": contract.method,
        "speculators_version": FORMAT_VERSION,
        "dtype": dtype,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.tap_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM 0.32 takes `not sliding_window_non_causal` as the causality of every layer, sliding or not.
        "sliding_window_non_causal": not any(config.causal),
        "target_hidden_size": None,
        **_head_fields(config, contract),
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.rms_norm_eps,
            "attention_bias": False,
            **_rotary_fields(config.rope_parameters),
            "layer_types": layer_types,
            "use_sliding_window": bool(windows),  # without it transformers' Qwen3Config drops the window
            "sliding_window": windows.pop() if len(windows) == 1 else None,
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": contract.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": contract.default_k,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": contract.verifier.name,
                "architectures": [contract.verifier.architecture],
            },
        },
        CONTRACT_KEY: contract.to_dict(),
    }


def _rotary_fields(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters as transformers 5 reads them, and as readers do that know the older two keys alone."""
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {
        "rope_parameters": dict(parameters),
        "rope_theta": parameters.get("rope_theta"),
        "rope_scaling": scaling if scaled else None,
    }


def _head_fields(config: DraftConfig, contract: Contract) -> dict[str, Any]:
    """DSpark's keys, for DSpark and for mixtures with its heads."""
    heads = config.sequential_head != "none" or config.confidence_head != "none"
    if contract.method != "dspark" and not heads:
        return {}
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": MARKOV_TYPES[config.sequential_head],
        "enable_confidence_head": config.confidence_head != "none",
        "confidence_head_with_markov": config.confidence_with_previous,
    }


def parse_config(raw: dict[str, Any], where: str) -> tuple[DraftConfig, Contract]:
    """Read a config.json, refusing one without a contract and any two statements that differ."""
    if CONTRACT_KEY not in raw:
        raise InputError(
            where, f"no key {CONTRACT_KEY!r}", "this draft carries no contract; blockdraft cannot vouch for it"
        )
    raw = {**raw, CONTRACT_KEY: upgraded(raw[CONTRACT_KEY], f"{where} contract")}
    contract = Contract.from_dict(raw[CONTRACT_KEY], f"{where} contract")
    layer = checked(_LAYER, raw.get("transformer_layer_config"), f"{where} transformer_layer_config")
    config = DraftConfig(
        hidden_size=layer["hidden_size"],
        num_layers=layer["num_hidden_layers"],
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        intermediate_size=layer["intermediate_size"],
        rms_norm_eps=layer["rms_norm_eps"],
        vocab_size=contract.verifier.vocab_size,
        draft_vocab_size=contract.draft_vocab_size,
        tap_ids=contract.tap_ids,
        context_fusion=contract.context_fusion,
        context_kv=contract.context_kv,
        sequential_head=contract.sequential_head,
        markov_rank=contract.markov_rank,
        confidence_head=contract.confidence_head,
        confidence_with_previous=contract.confidence_with_previous,
        sample_from_anchor=contract.sample_from_anchor,
        standardise_taps=contract.tap_standardisation == "explicit",
        block_size=contract.block_size,
        mask_token_id=contract.mask_token_id,
        rope_parameters=contract.rope_parameters,
        max_position_embeddings=contract.max_position_embeddings,
        windows=contract.windows,
        causal=contract.causal,
    )
    _require_angles(config, f"{where} contract rope_parameters")
    _require_consistent(config, contract, where)
    stated = {key: value for key, value in raw.items() if key != DIGEST}
    wanted = config_json(config, contract, raw.get("dtype", ""))
    for key in ADDED:
        if key not in layer:
            del wanted["transformer_layer_config"][key]
    _require_equal(stated, wanted, where)
    return config, contract


def _require_angles(config: DraftConfig, where: str) -> None:
    """Reject rotary parameters that give no angles."""
    try:
        usable = RotaryPositions(config).usable()
    except Exception as error:  # each rotary type reads its parameters as it likes
        raise InputError(where, config.rope_parameters, f"no rotary angles follow from it ({reason(error)})") from None
    if not usable:
        raise InputError(where, config.rope_parameters, "some of its rotary angles are no numbers above 0")


def _require_consistent(config: DraftConfig, contract: Contract, where: str) -> None:
    """Contract fields that follow from others, or of which this version knows one value only."""
    if contract.method != config.method:
        raise InputError(f"{where} contract method", contract.method, f"these sockets are {config.method!r}")
    if (contract.vocab_map_hash is not None) != config.reduced:
        kind = "a reduced vocabulary has one" if config.reduced else "a full vocabulary has none"
        raise InputError(f"{where} contract vocab_map_hash", contract.vocab_map_hash, kind)
    allowed = ("none", "folded") if config.context_fusion == "projected" else ("none", "explicit")
    if contract.tap_standardisation not in allowed:
        raise InputError(
            f"{where} contract tap_standardisation",
            contract.tap_standardisation,
            f"{config.context_fusion} fusion has one of {', '.join(allowed)}",
        )
    contract.require_k(contract.default_k, f"{where} contract default_k")


def _require_equal(found: Any, wanted: Any, where: str) -> None:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            if key not in found:
                raise InputError(f"{where} {key}", "missing", f"the contract makes it {wanted[key]!r}")
            if key not in wanted:
                raise InputError(f"{where} {key}", repr(found[key]), "unknown key, which would be lost silently")
            _require_equal(found[key], wanted[key], f"{where} {key}")
    elif found != (list(wanted) if isinstance(wanted, tuple) else wanted):
        raise InputError(where, repr(found), f"the rest of the checkpoint says {wanted!r}")
