"""A worker for Speculators 0.9.0, run by its own environment's Python: its DFlash step on random states.

As its trainer does it: float32 parameters, autocast for bfloat16, forward and backward. On CPUs it has no fused
losses and no FlexAttention, so it runs sdpa and eager losses.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[0], here = "", sys.path[0]  # this file is named like the package it imports
sys.path.append(here)

import torch  # noqa: E402
from protocol import (  # noqa: E402
    BLOCK,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    MASK,
    PROMPT,
    TAPS,
    VERIFIER_LAYERS,
    Case,
    serve,
)
from speculators.models.dflash import DFlashDraftModel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config  # noqa: E402

SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def verifier_folder(case: Case, folder: str) -> None:
    """A small Llama with the case's vocabulary; its config claims the depth that the taps need."""
    model = LlamaForCausalLM(
        LlamaConfig(**SHAPE, vocab_size=case.vocab, num_hidden_layers=1, tie_word_embeddings=False)
    )
    model.config.num_hidden_layers = VERIFIER_LAYERS
    model.save_pretrained(folder)


def main() -> None:
    case = Case.from_argv()
    torch.manual_seed(0)
    layer_config = Qwen3Config(
        **SHAPE,
        vocab_size=case.vocab,
        num_hidden_layers=LAYERS,
        hidden_act="silu",
        layer_types=["full_attention"] * LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=False,
    )
    loss = {"ce": "ce", "kl": "kl_div"}[case.loss]
    weighting = "dpace" if case.loss == "ce" else "fixed-exp-decay"
    with tempfile.TemporaryDirectory() as folder:
        verifier_folder(case, folder)
        model = DFlashDraftModel.from_training_args(
            verifier_config=layer_config,
            verifier_name_or_path=folder,
            draft_vocab_size=case.vocab,
            block_size=BLOCK,
            target_layer_ids=list(TAPS),
            mask_token_id=MASK,
            draft_attn_impl="sdpa",
        )
    arguments, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn=loss, loss_implementation="eager", max_anchors=case.anchors, per_position_loss_weight=weighting
    )
    dtype = getattr(torch, case.dtype)
    batch = {
        "hidden_states": torch.randn(1, case.seq_len, len(TAPS) * HIDDEN).to(dtype),
        "input_ids": torch.randint(5, case.vocab, (1, case.seq_len)),
        "loss_mask": (torch.arange(case.seq_len) >= PROMPT).long()[None],
        "verifier_last_hidden_states": torch.randn(1, case.seq_len, HIDDEN).to(dtype),
        "document_ids": torch.zeros(1, case.seq_len, dtype=torch.int64),
        "position_ids": torch.arange(case.seq_len)[None],
    }

    def step() -> float:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            _, value, _ = model(**batch, **arguments)
        value.backward()
        return float(value.detach())

    serve(step)


if __name__ == "__main__":
    main()
