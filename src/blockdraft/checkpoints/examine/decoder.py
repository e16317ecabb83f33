"""Checks of the decoder layers as other readers take them: depth, rotary fields, windows, causality, activation."""

from __future__ import annotations

import re

from blockdraft.checkpoints.examine.facts import CheckpointFacts
from blockdraft.checkpoints.examine.finding import Findings, Statement, agree, error, warning
from blockdraft.checkpoints.store import CONFIG

_SLIDING = "sliding_attention"


def depth(facts: CheckpointFacts) -> Findings:
    """Config, contract, layer types, command and tensors have one number of layers."""
    types = facts.layers.get("layer_types")
    found = {int(match[1]) for name in facts.tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    yield from agree(
        [
            Statement(f"{CONFIG} num_hidden_layers", facts.number_of_layers),
            Statement("contract num_layers", facts.draft.get("num_layers")),
            Statement("length of layer_types", len(types) if isinstance(types, list) else None),
            Statement("layers among the tensors", max(found) + 1 if found else None),
            *(Statement(f"{each.where} --num-layers", each.number("num_layers")) for each in facts.commands),
        ],
        "a layer would be dropped or left without weights",
    )


def rotary(facts: CheckpointFacts) -> Findings:
    """New and old rotary fields say the same to every reader."""
    layers = facts.layers
    parameters = layers.get("rope_parameters")
    where = f"{CONFIG} rope_parameters"
    if isinstance(parameters, dict) and any(isinstance(each, dict) for each in parameters.values()):
        yield error(where, "one entry a layer type", "drafts have one; vLLM reads a flat one")
        return
    parameters = parameters if isinstance(parameters, dict) else {}
    theta = parameters.get("rope_theta")
    own = facts.draft.get("rope_parameters")
    yield from agree(
        [
            Statement(f"{where} rope_theta", theta),
            Statement(f"{CONFIG} rope_theta", layers.get("rope_theta")),
            Statement("contract rope_theta", own.get("rope_theta") if isinstance(own, dict) else None),
        ],
        "readers of the other field would turn by other angles",
    )
    if theta is None and layers.get("rope_theta") is None:
        yield warning(f"{CONFIG} rope_theta", "missing", "vLLM takes 1,000,000, transformers takes 10,000")
    scaling = layers.get("rope_scaling")
    stated = scaling if isinstance(scaling, dict) else {}
    types = (parameters.get("rope_type", "default"), stated.get("rope_type", stated.get("type", "default")))
    if "rope_scaling" in layers and parameters and types[0] != types[1]:
        yield error(f"{CONFIG} rope_scaling", types[1], f"{where} says {types[0]}")


def windows(facts: CheckpointFacts) -> Findings:
    """Window, layer types and their switch fit together."""
    layers = facts.layers
    types = layers.get("layer_types")
    window, switch = layers.get("sliding_window"), layers.get("use_sliding_window")
    sliding = isinstance(types, list) and _SLIDING in types
    if sliding and switch is False:
        yield error(
            f"{CONFIG} use_sliding_window", switch, f"layer_types has {_SLIDING}; transformers drops the window"
        )
    if sliding and window is None and not facts.own:
        yield error(f"{CONFIG} sliding_window", window, f"layer_types has {_SLIDING}, which needs a width")
    if isinstance(types, list) and not sliding and switch is True:
        yield error(f"{CONFIG} use_sliding_window", switch, f"layer_types has no {_SLIDING}")
    size = facts.stated("block_size")
    if sliding and isinstance(window, int) and isinstance(size, int) and window <= size:
        yield error(f"{CONFIG} sliding_window", window, f"must be larger than the block size, {size}")
    swa = facts.nested.get("use_swa")
    if swa is not None and isinstance(types, list) and bool(swa) != sliding:
        yield error(f"{CONFIG} dflash_config use_swa", swa, f"layer_types says {'yes' if sliding else 'no'}")
    yield from agree(
        [
            Statement(f"{CONFIG} sliding_window", window if sliding else None),
            Statement(f"{CONFIG} dflash_config swa_window_size", facts.nested.get("swa_window_size")),
            *(Statement(f"{each.where} --sliding-window", each.number("sliding_window") or None)
              for each in facts.commands if sliding),
        ],
        "engines take the first",
    )  # fmt: skip


def causality(facts: CheckpointFacts) -> Findings:
    """The engine lets a slot see what it saw in training.

    vLLM 0.32 takes `not sliding_window_non_causal` as the causality of every layer of a DFlash draft, also of layers
    without a window, which Speculators trains without causality.
    """
    stated = facts.config.get("sliding_window_non_causal")
    where = f"{CONFIG} sliding_window_non_causal"
    causal = facts.draft.get("causal")
    if isinstance(causal, list) and isinstance(stated, bool) and stated == any(causal):
        yield error(where, stated, f"contract causal says {causal}; vLLM would apply {not stated} to every layer")
    types = facts.layers.get("layer_types")
    full = not isinstance(types, list) or "full_attention" in types
    mixed = isinstance(types, list) and full and _SLIDING in types
    if facts.layout == "speculators" and facts.method in ("dflash", "dflare") and stated is False and full:
        hint = "vLLM makes every layer causal, training left those with full attention bidirectional"
        yield error(where, stated, f"{hint}; {'this mixture cannot be expressed' if mixed else 'write true'}")
    yield from agree(
        [
            Statement(f"{CONFIG} dflash_config causal", facts.nested.get("causal")),
            Statement(f"{CONFIG} is_causal", facts.config.get("is_causal")),
        ],
        "engines take the first",
    )


def activation(facts: CheckpointFacts) -> Findings:
    """vLLM's draft layers have one activation."""
    found = facts.layers.get("hidden_act")
    if found not in (None, "silu"):
        yield error(f"{CONFIG} hidden_act", found, "vLLM serves draft layers with silu alone; train with silu")
