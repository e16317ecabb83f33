"""What is read off a verifier's config: its windows, rotary parameters, layer shape and scale of logits.

Families spell these in many ways. What is not understood here is rejected in one line; what is understood is still
proved against the model's own forward when it is loaded (`verifiers.proof`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from blockdraft.errors import InputError
from blockdraft.verifiers.base import LayerShape

FULL, SLIDING = "full_attention", "sliding_attention"
# Rotary types whose angles depend on the position alone. The others change with the length of the text ("dynamic",
# "longrope"): keys that are in a cache would keep the angles of a shorter text.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# What families call the norm behind the last layer.
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "embedding_norm", "layer_norm")
# By the name of the field: whether the head's output is multiplied by it (1) or divided (-1). The names mislead.
_LOGIT_SCALES = {"logit_scale": 1, "logits_scaling": -1}
_MULTIPLY_ALL = frozenset({"hyperclovax"})


def require_known(model: Any, name: str) -> None:
    """Reject a family that cannot be driven, by what its config and modules say.

    Raises:
        InputError: no decoder layers, layers that are no softmax attention, no rotary positions, or rotary angles that
            depend on the length of the text.
    """
    config = model.config.get_text_config()

    def reject(why: str) -> InputError:
        return InputError("verifier", name, f"{type(model).__name__} is not supported: {why}")

    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or model.get_output_embeddings() is None:
        raise reject("it has no list of decoder layers below an output head")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise reject("its output head has a bias, which drafts of this family cannot share")
    if other := set(layer_types(config)) - {FULL, SLIDING}:
        raise reject(
            f"layers of type {', '.join(sorted(other))}; only full and sliding softmax attention can be rolled back"
        )
    kinds = rope_kinds(config)
    if not kinds:
        raise reject("its positions are not rotary")
    for kind in kinds:
        if kind.get("rope_type", "default") not in _FIXED_ROPE:
            raise reject(f"rotary type {kind['rope_type']!r} depends on the length of the text")
    try:
        layer_shape(config)
    except AttributeError as error:
        raise reject(f"its config does not state the shape of a layer ({error})") from None


def final_norm_of(model: Any, name: str) -> nn.Module:
    """The module between the last decoder layer and the output head.

    Raises:
        InputError: the decoder has none of a known name.
    """
    children = dict(model.get_decoder().named_children())
    found = next((children[each] for each in _FINAL_NORMS if each in children), None)
    if found is None:
        raise InputError("verifier", name, f"{type(model).__name__} is not supported: its final norm is not known")
    return found


def layer_types(config: Any) -> tuple[str, ...]:
    """The kind of attention of every layer; empty where the config does not state any."""
    return tuple(getattr(config, "layer_types", None) or ())


def window_of(config: Any) -> int | None:
    """How many positions a sliding layer sees, its own included; None where no layer slides.

    `sliding_window` alone means nothing where the layers have types: many configs state it beside full layers.
    """
    types = layer_types(config)
    return None if types and SLIDING not in types else getattr(config, "sliding_window", None)


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a config, one dictionary for each kind of layer that has its own."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = [dict(value) for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])


def rope_parameters(config: Any) -> dict[str, Any]:
    """One flat rotary dictionary (rope_type, rope_theta, scaling) that a draft can inherit.

    Of a dictionary for each kind of layer it is that of the full layers. Gemma 4's "proportional" type rotates a part
    of a head by the angles of the whole one; a draft rotates all of it, which is the default type.
    """
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    nested = parameters.get(FULL)
    flat = dict(nested) if isinstance(nested, dict) else parameters
    if flat.get("rope_type") == "proportional":
        flat["rope_type"] = "default"
    return flat


def layer_shape(config: Any) -> LayerShape:
    """Shape of a decoder layer; of the most frequent kind where layers differ.

    Raises:
        AttributeError: the config does not state it.
    """
    types = layer_types(config)
    common = types.index(Counter(types).most_common(1)[0][0]) if types else 0

    def of_layer(name: str) -> Any:
        # Configs with values of their own for some layers answer for one layer only.
        per_layer = getattr(config, "per_layer_config", None)
        value = getattr(config if per_layer is None else per_layer[common], name, None)
        return value[common] if isinstance(value, (list, tuple)) else value

    heads, width = of_layer("num_attention_heads"), of_layer("intermediate_size")
    if width is None and of_layer("moe_intermediate_size"):  # experts alone: what a token runs through
        width = of_layer("moe_intermediate_size") * (of_layer("num_experts_per_tok") or 1)
    if heads is None or width is None:
        raise AttributeError("num_attention_heads" if heads is None else "intermediate_size")
    norms = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    return LayerShape(
        num_heads=heads,
        num_kv_heads=of_layer("num_key_value_heads") or heads,
        # Read, never derived where it is stated: families differ from hidden_size / heads.
        head_dim=of_layer("head_dim") or config.hidden_size // heads,
        intermediate_size=width,
        rms_norm_eps=next((eps for eps in map(of_layer, norms) if eps is not None), 1e-6),
    )


def logit_scale_of(config: Any) -> float:
    """Factor between the output head and the logits (Granite divides, Cohere multiplies); 1 in most families."""
    scale = 1.0
    for field, power in _LOGIT_SCALES.items():
        stated = getattr(config, field, None)
        if isinstance(stated, (int, float)):
            scale *= float(stated) ** (1 if config.model_type in _MULTIPLY_ALL else power)
    return scale
