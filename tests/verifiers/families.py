"""Tiny random models of transformers' families, and what is known of each: right, or rejected and why.

PYTHONPATH=tests python -m verifiers.page    # writes docs/verifiers.md from this table
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 12  # of every model that has one: texts of the tests are longer
# By the name of the field, where a family's config has it.
_SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "sliding_window": WINDOW,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.3, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128, "global_head_dim": 32, "swa_head_dim": 16,
    "swa_v_head_dim": 16, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "d_model": 32, "n_layers": 4,
    "n_heads": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "rotary_dim": 4, "ffn_dim": 48,
    "encoder_layers": 2, "decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4,
}  # fmt: skip
_VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8,
    "num_key_value_heads": 1, "image_size": 4, "patch_size": 2,
}  # fmt: skip
_IMAGE_TOKENS = {
    "image_token_id": 102, "boi_token_id": 103, "eoi_token_id": 104, "video_token_id": 105, "audio_token_id": 106,
    "image_token_index": 102, "boi_token_index": 103, "eoi_token_index": 104, "mm_tokens_per_image": 4,
}  # fmt: skip

# Why a family is rejected, as the error says.
NO_LAYERS = "no list of decoder layers"
NO_ROTARY = "positions are not rotary"
LAYER_TYPE = "layers of type"
ROPE_TYPE = "depends on the length of the text"
BIAS = "output head has a bias"
SHAPE = "shape of a layer"
UNLIKE = "is not supported ("  # its own code cannot be driven
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}
ONE_OF_EACH = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ALL_FULL = ["full_attention"] * 4


@dataclass(frozen=True)
class Family:
    """A model type with one configuration of it.

    Attributes:
        changes: fields on top of the small sizes.
        rejected: a part of the error that loading it raises; None where it is right.
        note: what the configuration is there to show, beside the plain one of its model type.
        text_type: model type of the text model inside a multimodal class.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    rejected: str | None = None
    note: str = ""
    text_type: str = ""

    @property
    def name(self) -> str:
        return f"{self.model_type}: {self.note}" if self.note else self.model_type


def tiny_config(family: Family) -> Any:
    """The family's config at small sizes, with layers of each kind that its default has."""
    if family.text_type:
        text = tiny_config(Family(family.text_type, family.changes)).to_dict()
        no_audio = {} if family.model_type == "gemma3" else {"audio_config": None}
        return CONFIG_MAPPING[family.model_type](text_config=text, vision_config=_VISION, **_IMAGE_TOKENS, **no_audio)
    kind = CONFIG_MAPPING[family.model_type]
    stated = kind().to_dict()
    values = {name: value for name, value in _SMALL.items() if name in stated}
    if "qk_rope_head_dim" in stated:  # latent attention: the width that is rotated
        values.pop("head_dim", None)
        values["num_key_value_heads"] = values["num_attention_heads"]
    if isinstance(stated.get("layer_types"), list):
        kinds = list(dict.fromkeys(stated["layer_types"]))
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(3)] + stated["layer_types"][-1:]
    return kind(**{**values, **family.changes})


def tiny_model(family: Family) -> PreTrainedModel:
    """A random model whose norms, biases and sinks all matter: those of one or zero hide faults."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def _plain(*names: str) -> list[Family]:
    return [Family(name) for name in names]


def _rejected(why: str, *names: str, **changes: Any) -> list[Family]:
    return [Family(name, changes, why) for name in names]


# fmt: off
RIGHT = [
    *_plain(
        "afmoe", "apertus", "arcee", "aria_text", "bitnet", "cohere", "cohere2", "cohere2_moe", "deepseek_v2",
        "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
        "fuyu", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
        "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe",
        "laguna", "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral",
        "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon",
        "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
        "stablelm", "starcoder2", "vaultgemma", "youtu",
    ),
    Family("axk1", {"head_dim": 8}),
    Family("helium", {"head_dim": 8}),
    Family("cwm", {"eos_token_id": [1, 3]}),
    Family("granitemoehybrid", {"layer_types": ALL_FULL, **_MAMBA}, note="attention alone"),
    Family("gemma3", text_type="gemma3_text"),
    Family("gemma4", {"num_kv_shared_layers": 2}, text_type="gemma4_text"),
    Family("gemma4_unified", text_type="gemma4_unified_text"),
    *[
        Family(name, {"sliding_window": WINDOW, "layer_types": ALL_FULL, **more}, note="a window beside full layers")
        for name, more in {
            "qwen2": {"use_sliding_window": True}, "qwen3": {"use_sliding_window": True}, "gemma2": {},
            "gemma3_text": {}, "gemma4_text": {}, "olmo3": {}, "cohere2": {}, "exaone4": {}, "ministral": {},
            "mellum": {}, "smollm3": {"use_sliding_window": False}, "laguna": {}, "afmoe": {}, "gpt_oss": {},
        }.items()
    ],
    Family("qwen2", {"use_sliding_window": True, "layer_types": ONE_OF_EACH}, note="sliding and full layers"),
    Family("qwen3", {"use_sliding_window": True, "layer_types": ONE_OF_EACH}, note="sliding and full layers"),
    Family("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, note="tight soft caps"),
    Family("vaultgemma", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, note="tight soft caps"),
    *[
        Family(
            name,
            {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
             "attention_multiplier": 0.2},
            note="multipliers",
        )
        for name in ("granite", "granitemoe", "granitemoeshared", "hyperclovax")
    ],
    Family("cohere", {"logit_scale": 0.25}, note="another scale of logits"),
    Family("llama", {"tie_word_embeddings": True}, note="tied"),
    Family("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
           note="linear rotary"),
    Family("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                         "original_max_position_embeddings": 64}}, note="yarn rotary"),
    Family("gemma4_text", {"hidden_size_per_layer_input": 0}, note="without per-layer embeddings"),
    Family("gemma4_text", {"num_kv_shared_layers": 2}, note="layers that share keys"),
    Family("gemma4_text", {"attention_k_eq_v": True}, note="keys that are values"),
    Family("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, note="experts"),
]

REJECTED = [
    *_rejected(
        NO_LAYERS, "bert", "bert-generation", "big_bird", "bloom", "camembert", "codegen", "cpmant", "ctrl",
        "data2vec-text", "electra", "ernie", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "hrm_text",
        "megatron-bert", "mpt", "openai-gpt", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "rwkv", "modernbert-decoder", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "llama4_text",
    ),
    *_rejected(NO_LAYERS, "dbrx", attn_config={"rope_theta": 1e4, "kv_n_heads": 2}),
    *_rejected(
        NO_ROTARY, "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
        "opt", "pegasus", "prophetnet", "trocr", "xglm",
    ),
    *_rejected(
        LAYER_TYPE, "axk2", "deepseek_v32", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm_moe_dsa", "hy_v4",
        "inkling_text", "jamba", "kimi_linear", "mamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next",
    ),
    *_rejected(LAYER_TYPE, "lfm2", "lfm2_moe", layer_types=["conv", "full_attention"] * 2),
    *_rejected(LAYER_TYPE, "granitemoehybrid", layer_types=["mamba", "attention"] * 2, **_MAMBA),
    *_rejected(LAYER_TYPE, "mamba2", num_heads=4, head_dim=16, state_size=8),
    Family("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2}, LAYER_TYPE,
           "sparse layers"),
    *_rejected(SHAPE, "gpt_neox_japanese", "moshi"),
    *_rejected(BIAS, "phi"),
    *_rejected(UNLIKE, "doge", "recurrent_gemma", "longcat_flash"),
    Family("gemma3n_text", {"num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2,
                            "layer_types": ONE_OF_EACH, "intermediate_size": [48] * 4,
                            "activation_sparsity_pattern": [0.0] * 4}, UNLIKE),
    Family("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, ROPE_TYPE,
           "dynamic rotary"),
    Family("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                                        "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}}, ROPE_TYPE,
           "longrope rotary"),
]
FAMILIES = [*RIGHT, *REJECTED]
# No tiny model of these is made here: other tasks under a causal name, or a config of fixed sizes.
NOT_TRIED = frozenset({
    "bamba", "blt", "cohere_compass_text", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "git",
    "got_ocr2", "llama4", "mllama", "musicgen", "musicgen_melody", "phi4_multimodal", "plbart", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "reformer", "whisper", "xlm", "zamba", "zamba2", "zaya",
})
# fmt: on
