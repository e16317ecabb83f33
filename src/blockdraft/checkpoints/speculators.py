"""config.json and tensor names of the Speculators format (version 0.9), with the contract under ``blockdraft``.

The format states some facts twice and the contract states them again. Reading does not pick one: the config.json that
the contract would be written as is made anew and compared, and any difference is rejected by name.
"""

from __future__ import annotations

from typing import Any

from blockdraft.checkpoints.older import upgraded
from blockdraft.contract import Contract
from blockdraft.draft_config import DraftConfig
from blockdraft.errors import InputError
from blockdraft.files import reason
from blockdraft.models.positions import RotaryPositions
from blockdraft.presets import architecture_of

FORMAT_VERSION = "0.9.0"
CONTRACT_KEY = "blockdraft"
DIGEST = "blockdraft_digest"  # signs config and weights of one export (`store.digest`)
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
HEAD = "lm_head.weight"  # rows of the verifier's head for a reduced vocabulary; engines need them in the file


def config_json(contract: Contract, dtype: str) -> dict[str, Any]:
    """The config.json that vLLM and Speculators read, and we do."""
    config = contract.draft
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    # The format has one window and one causality for all layers. A draft with more is custom, whose own statement
    # of both stands in the contract and which no engine takes for something else.
    windows = {window for window in config.windows if window is not None}
    return {
        "architectures": [architecture_of(config.method)],
        "speculators_model_type": config.method,
        "speculators_version": FORMAT_VERSION,
        "dtype": dtype,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM 0.32 takes `not sliding_window_non_causal` as the causality of every layer, sliding or not.
        "sliding_window_non_causal": not any(config.causal),
        "target_hidden_size": None,
        **_head_fields(config),
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
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
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_speculative_tokens,
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


def _head_fields(config: DraftConfig) -> dict[str, Any]:
    """DSpark's keys, for DSpark and for custom drafts with its heads."""
    heads = config.sequential_head != "none" or config.confidence_head != "none"
    if config.method != "dspark" and not heads:
        return {}
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": MARKOV_TYPES[config.sequential_head],
        "enable_confidence_head": config.confidence_head != "none",
        "confidence_head_with_markov": config.confidence_with_previous,
    }


def parse_config(raw: dict[str, Any], where: str) -> Contract:
    """Read a config.json.

    Raises:
        InputError: it has no contract, or two of its statements differ.
    """
    if CONTRACT_KEY not in raw:
        raise InputError(
            where, f"no key {CONTRACT_KEY!r}", "this draft carries no contract; blockdraft cannot vouch for it"
        )
    raw = upgraded(raw, CONTRACT_KEY, f"{where} contract")
    contract = Contract.from_dict(raw[CONTRACT_KEY], f"{where} contract")
    _require_angles(contract.draft, f"{where} contract rope_parameters")
    _require_consistent(contract, f"{where} contract")
    own = (DIGEST, CONTRACT_KEY)
    stated = {key: value for key, value in raw.items() if key not in own}
    wanted = {key: value for key, value in config_json(contract, raw.get("dtype", "")).items() if key not in own}
    layer = stated.get("transformer_layer_config")
    for key in ADDED:
        if isinstance(layer, dict) and key not in layer:
            del wanted["transformer_layer_config"][key]
    _require_equal(stated, wanted, where)
    return contract


def _require_angles(config: DraftConfig, where: str) -> None:
    """Reject rotary parameters that give no angles."""
    try:
        usable = RotaryPositions(config).usable()
    except Exception as error:  # each rotary type reads its parameters as it likes
        raise InputError(where, config.rope_parameters, f"no rotary angles follow from it ({reason(error)})") from None
    if not usable:
        raise InputError(where, config.rope_parameters, "some of its rotary angles are no numbers above 0")


def _require_consistent(contract: Contract, where: str) -> None:
    """Contract fields that say something of one another."""
    draft = contract.draft
    if draft.vocab_size != contract.verifier.vocab_size:
        raise InputError(f"{where} draft vocab_size", draft.vocab_size, "must be the verifier's")
    if (contract.vocab_map_hash is not None) != draft.reduced:
        kind = "a reduced vocabulary has one" if draft.reduced else "a full vocabulary has none"
        raise InputError(f"{where} vocab_map_hash", contract.vocab_map_hash, kind)
    if draft != draft.exported:
        raise InputError(f"{where} draft standardize_taps", True, "a projection has it folded into its weight")


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
