"""Checks of blocks, target layers, fusion and names."""

from __future__ import annotations

from blockdraft.checkpoints.examine.facts import CheckpointFacts
from blockdraft.checkpoints.examine.finding import Findings, Statement, agree, error, warning
from blockdraft.checkpoints.store import CONFIG

_TOP = frozenset((
    "architectures", "auto_map", "speculators_model_type", "speculators_version", "speculators_config", "dtype",
    "torch_dtype", "model_type", "block_size", "draft_vocab_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sample_from_anchor", "sliding_window_non_causal", "target_hidden_size", "transformer_layer_config", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "transformers_version", "max_anchors",
    "tie_word_embeddings", "blockdraft", "blockdraft_digest", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k", "xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes", "has_no_defaults_at_init",
))  # fmt: skip
_NESTED = frozenset((
    "mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size", "attention_sink_bias",
    "attention_value_scale", "use_aux_hidden_state", "sample_from_anchor", "input_embedding_scale", "projector_type",
    "markov_rank", "num_target_layers", "draft_vocab_size",
))  # fmt: skip


def known_layout(facts: CheckpointFacts) -> Findings:
    """The config is of a layout that somebody reads."""
    if facts.layout == "unknown":
        yield error(
            CONFIG, ", ".join(sorted(facts.config)[:6]) or "empty",
            "of no known layout: Speculators, z-lab, AngelSlim, DeepSpec or blockdraft",
        )  # fmt: skip


def unknown_keys(facts: CheckpointFacts) -> Findings:
    """No key is lost on readers. (Our own layout: the check `contract` is exact.)"""
    if facts.layout == "speculators":
        for key in sorted(facts.config.keys() - _TOP):
            yield warning(f"{CONFIG} {key}", repr(facts.config[key])[:80], "no reader of the format knows this key")
    for key in sorted(facts.nested.keys() - _NESTED):
        yield warning(f"{CONFIG} dflash_config {key}", repr(facts.nested[key])[:80], "no reader knows this key")


def block_size(facts: CheckpointFacts) -> Findings:
    """Config, contract and command state one block size."""
    statements = [
        Statement(f"{CONFIG} block_size", facts.config.get("block_size")),
        Statement(f"{CONFIG} dflash_config block_size", facts.nested.get("block_size")),
        Statement("contract block_size", facts.draft.get("block_size")),
        *(Statement(f"{each.where} --block-size", each.number("block_size")) for each in facts.commands),
    ]
    yield from agree(statements, "a draft works at the block size it was trained with")
    first = next((each for each in statements if each.value is not None), None)
    if first is None:
        yield error(f"{CONFIG} block_size", "missing", "nothing else tells it")
    elif not isinstance(first.value, int) or first.value < 2:
        yield error(first.where, first.value, "must be 2 or more: an anchor and a slot")


def speculative_tokens(facts: CheckpointFacts) -> Findings:
    """The number of proposed tokens follows from the block."""
    size, proposed = facts.stated("block_size"), facts.proposed
    where = f"{CONFIG} speculators_config speculative_tokens"
    if proposed is None:
        if facts.layout in ("blockdraft", "speculators"):
            yield error(where, "missing", "vLLM takes K from it")
        return
    if isinstance(size, int):
        anchor = bool(facts.stated("sample_from_anchor"))
        wanted = size if anchor else size - 1
        if proposed != wanted:
            slot = "with" if anchor else "without"
            yield error(where, proposed, f"a block of {size} {slot} the anchor's slot proposes {wanted}")


def anchor_slot(facts: CheckpointFacts) -> Findings:
    """All agree on whether the anchor's slot proposes a token."""
    yield from agree(
        [
            Statement(f"{CONFIG} sample_from_anchor", facts.config.get("sample_from_anchor")),
            Statement(f"{CONFIG} dflash_config sample_from_anchor", facts.nested.get("sample_from_anchor")),
            Statement("contract sample_from_anchor", facts.draft.get("sample_from_anchor")),
        ],
        "each slot would propose the token of its neighbor",
    )
    if not facts.own and facts.method == "dflash" and facts.stated("sample_from_anchor"):
        yield error(
            f"{CONFIG} sample_from_anchor", True, "vLLM 0.32 rejects a DFlash draft with it, or ignores it silently"
        )
    if facts.layout == "speculators" and facts.method == "dspark" and facts.stated("sample_from_anchor") is None:
        yield error(f"{CONFIG} sample_from_anchor", "missing", "vLLM takes false, Speculators takes true for DSpark")


def target_layers(facts: CheckpointFacts) -> Findings:
    """Target layers ascend, are the command's and the contract's, and the verifier has them."""
    ids = facts.target_layer_ids
    where = f"{CONFIG} target layers"
    if not ids:
        yield error(where, "missing", "must be a list of whole numbers")
        return
    if ids != sorted(set(ids)):
        yield error(where, ids, "vLLM sorts them and drops repetitions, fc.weight does not; must ascend")
    yield from agree(
        [
            Statement(where, ids),
            Statement("contract target_layer_ids", facts.draft.get("target_layer_ids")),
            *(Statement(f"{each.where} --target-layer-ids", each.numbers("target_layer_ids"))
              for each in facts.commands if facts.layout in ("blockdraft", "speculators")),
        ],
        "the draft would read other hidden states than it was trained on",
    )  # fmt: skip
    own = facts.contract.get("verifier")
    depths = [
        Statement("contract verifier num_layers", own.get("num_layers") if isinstance(own, dict) else None),
        Statement(f"{CONFIG} num_target_layers", facts.stated("num_target_layers")),
        Statement("verifier num_hidden_layers", facts.verifier.get("num_hidden_layers")),
    ]
    yield from agree(depths, "the draft is of another verifier")
    for depth in depths:
        if isinstance(depth.value, int) and not 0 <= min(ids) <= max(ids) <= depth.value:
            yield error(where, ids, f"{depth.where} is {depth.value}; target layers are 0..{depth.value}")
            return


def fusion_width(facts: CheckpointFacts) -> Findings:
    """The fusion reads as many hidden states as there are target layers."""
    ids, width = facts.target_layer_ids, facts.layers.get("hidden_size")
    if not ids or not isinstance(width, int):
        return
    fc, mixing = facts.shape("fc.weight"), facts.shape("layer_fusion_weights")
    stated = facts.config.get("target_hidden_size")
    source = stated if isinstance(stated, int) and stated else width
    if fc is not None and fc != (width, len(ids) * source):
        yield error(
            "tensor fc.weight", list(fc), f"{len(ids)} target layers of {source} need [{width}, {len(ids) * source}]"
        )
    layers = facts.number_of_layers
    if mixing is not None and layers is not None and mixing != (layers, len(ids)):
        yield error("tensor layer_fusion_weights", list(mixing), f"must be [{layers}, {len(ids)}]: layers, targets")


def method_names(facts: CheckpointFacts) -> Findings:
    """Type, algorithm, class, command and tensors name one method."""
    stated = facts.config.get("speculators_config")
    algorithm = stated.get("algorithm") if isinstance(stated, dict) else None
    kind = facts.method
    yield from agree(
        [
            Statement(f"{CONFIG} speculators_model_type", facts.config.get("speculators_model_type")),
            Statement(f"{CONFIG} speculators_config algorithm", algorithm),
            *(Statement(f"{each.where} --speculator-type", each.text("speculator_type")) for each in facts.commands
              if kind != "blockdraft"),
        ],
        "engines choose the model by the type",
    )  # fmt: skip
    if kind is None or not facts.tensors or kind == "blockdraft":
        return
    for owner, name in (("dflare", "layer_fusion_weights"), ("dspark", "markov_head.markov_w1.weight")):
        if name in facts.tensors and kind in ("dflash", "dflare", "dspark") and kind != owner:
            yield error(f"tensor {name}", f"in a {kind} draft", f"belongs to {owner}; engines drop it or fail")
    needed = {"dflash": "fc.weight", "dspark": "fc.weight", "dflare": "layer_fusion_weights"}.get(kind)
    if needed and needed not in facts.tensors:
        yield error(f"tensor {needed}", "missing", f"a {kind} draft cannot read its target layers without it")


def verifier_names(facts: CheckpointFacts) -> Findings:
    """Config, contract and command name one verifier, whose width is the draft's."""
    own = facts.contract.get("verifier")
    stated = facts.config.get("speculators_config")
    listed = stated.get("verifier") if isinstance(stated, dict) else None
    names = [
        Statement(f"{CONFIG} verifier name_or_path", listed.get("name_or_path") if isinstance(listed, dict) else None),
        *(Statement(f"{each.where} --verifier-name-or-path", each.text("verifier_name_or_path"))
          for each in facts.commands),
    ]  # fmt: skip
    given = [each for each in names if isinstance(each.value, str)]
    for each in given[1:]:  # folders move: the last part of a name is what must stay
        if _last(each.value) != _last(given[0].value):
            yield warning(each.where, each.value, f"{given[0].where} says {given[0].value}")
    width = facts.config.get("target_hidden_size") or facts.layers.get("hidden_size")
    yield from agree(
        [
            Statement(f"{CONFIG} hidden_size", width),
            Statement("contract verifier hidden_size", own.get("hidden_size") if isinstance(own, dict) else None),
            Statement("verifier hidden_size", facts.verifier.get("hidden_size")),
        ],
        "the draft reads hidden states of this width",
    )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
