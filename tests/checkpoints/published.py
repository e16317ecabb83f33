"""Small drafts as others publish them, in their layouts, with sizes scaled down; whole until a test breaks them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, WIDTH, LAYERS, TAPS = 262, 128, 16, 2, (1, 3, 5)
Json = dict[str, Any]


def decoder(vocab: int = VOCAB, layers: int = LAYERS) -> Json:
    """The config of the draft's layers."""
    return {
        "model_type": "qwen3", "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "hidden_act": "silu", "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip


def speculators(method: str, draft_vocab: int, taps: tuple[int, ...] = TAPS) -> Json:
    """config.json of the Speculators format."""
    return {
        "architectures": [{"dflash": "DFlashDraftModel", "dflare": "DFlareDraftModel"}[method]],
        "speculators_model_type": method, "speculators_version": "0.9.0", "dtype": "bfloat16", "block_size": 8,
        "draft_vocab_size": draft_vocab, "aux_hidden_state_layer_ids": list(taps), "mask_token_id": 4,
        "sample_from_anchor": False, "sliding_window_non_causal": True, "target_hidden_size": None,
        "transformer_layer_config": decoder(),
        "speculators_config": {
            "algorithm": method, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "org/verifier-it", "architectures": ["Gemma4ForCausalLM"]},
        },
    }  # fmt: skip


def zlab() -> Json:
    """config.json of z-lab's layout."""
    return {
        **decoder(), "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8, "num_target_layers": 6, "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [each - 1 for each in TAPS]},
    }  # fmt: skip


def deepspec() -> Json:
    """config.json of DeepSpec's layout."""
    return {
        **decoder(), "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 4, "markov_rank": 4,
        "target_layer_ids": [each - 1 for each in TAPS], "num_target_layers": 6, "torch_dtype": "bfloat16",
    }  # fmt: skip


def tensors(method: str, draft_vocab: int, taps: int = len(TAPS)) -> dict[str, Tensor]:
    """Weights of such a draft."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    found = {"hidden_norm.weight": random(WIDTH), "norm.weight": random(WIDTH)}
    if method == "dflare":
        found["layer_fusion_weights"] = random(LAYERS, taps)
    else:
        found["fc.weight"] = random(WIDTH, taps * WIDTH)
    if method == "dspark":
        found["markov_head.markov_w1.weight"] = random(VOCAB, 4)
        found["markov_head.markov_w2.weight"] = random(VOCAB, 4)
    shapes = {
        "self_attn.q_proj": (16, WIDTH), "self_attn.k_proj": (8, WIDTH), "self_attn.v_proj": (8, WIDTH),
        "self_attn.o_proj": (WIDTH, 16), "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
        "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (24, WIDTH), "mlp.up_proj": (24, WIDTH), "mlp.down_proj": (WIDTH, 24),
    }  # fmt: skip
    if method == "dflare":
        shapes |= {"self_attn.k_proj_target": (8, WIDTH), "self_attn.v_proj_target": (8, WIDTH)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    if draft_vocab < VOCAB:
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        found["lm_head.weight"] = random(draft_vocab, WIDTH)
    return found


CARD = "---\nlicense: apache-2.0\nbase_model: org/verifier-it\n---\n# A draft\n"


def write(folder: Path, config: Json, weights: dict[str, Tensor], card: str = CARD) -> Path:
    """Write a draft's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "README.md").write_text(card)
    return folder


LAYOUTS = {
    "speculators": (lambda: speculators("dflash", DRAFT_VOCAB), "dflash", DRAFT_VOCAB),
    "dflare": (lambda: speculators("dflare", DRAFT_VOCAB), "dflare", DRAFT_VOCAB),
    "z-lab": (zlab, "dflash", VOCAB),
    "angelslim": (lambda: {**zlab(), "architectures": ["QwenDFlashDraftModel"], "num_anchors": 512}, "dflash", VOCAB),
    "deepspec": (deepspec, "dspark", VOCAB),
}


def draft_of(layout: str, folder: Path) -> Path:
    """A whole draft in a layout."""
    config, method, draft_vocab = LAYOUTS[layout]
    return write(folder, config(), tensors(method, draft_vocab))


def change_config(folder: Path, *path: str, value: Any) -> None:
    """Set a key of config.json; None removes it."""
    config = json.loads((folder / "config.json").read_text())
    place = config
    for key in path[:-1]:
        place = place[key]
    if value is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, **changed: Tensor | None) -> None:
    """Set tensors by name, `__` for `.`; None removes one."""
    found = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


GEMMA_COMMAND = r"""python scripts/train.py \
    --verifier-name-or-path org/verifier-it --speculator-type dflash \
    --draft-vocab-size 128 --block-size 8 --num-layers 2 --target-layer-ids 1 3 5 \
    --max-anchors 1536 --epochs 3 --optimizer muon --lr 6e-4 --muon-lr 3e-3 \
    --run-name verifier-dflash-5epochs --save-path ./output/verifier-dflash-5epochs
"""


def published_gemma(folder: Path) -> Path:
    """The Gemma 4 draft: the whole vocabulary in config and weights, 128 (thousand) in the command; 5 epochs claimed
    by the name, 3 in command and training state."""
    card = CARD + f"\n```bash\n{GEMMA_COMMAND}```\n"
    write(folder, speculators("dflash", VOCAB), tensors("dflash", VOCAB), card)
    (folder / "training_state.json").write_text(json.dumps({"epoch": 3, "global_step": 900}))
    return folder


def published_t5gemma(folder: Path) -> Path:
    """The T5Gemma 2 draft: windows' causality applied to full layers, GELU of the verifier, rotary angles a layer
    type, and a command of 6 epochs whose state counts 2."""
    config = copy.deepcopy(speculators("dflare", DRAFT_VOCAB))
    config["sliding_window_non_causal"] = False
    config["transformer_layer_config"]["hidden_act"] = "gelu_pytorch_tanh"
    config["transformer_layer_config"]["rope_parameters"] = {
        "full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4},
    }  # fmt: skip
    write(folder, config, tensors("dflare", DRAFT_VOCAB))
    (folder / "train_command.txt").write_text(
        "torchrun train.py --speculator-type dflare --draft-vocab-size 128 --block-size 8 --epochs 6 --lr 6e-4 "
        "--run-name t5-dflare-6epochs\n"
    )
    (folder / "training_state.json").write_text(json.dumps({"epoch": 2, "lr": 1e-3}))
    return folder
