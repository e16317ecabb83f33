"""Tiny random verifiers of many families, drafts for them, and what vLLM must say with them.

Heads have 32 numbers, the least that vLLM's attention on CPU takes; windows are shorter than the prompts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from blockdraft.checkpoints.store import load_draft, save_draft
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.serving.launcher import engine_environment, speculative_config
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import load_verifier
from conftest import LAYERS, VOCAB, contract_of, tiny_config, tiny_draft, tiny_tokenizer
from serving.fixtures import EAGER, Checkpoint, OwnText, findings_of

HIDDEN, HEAD, WINDOW, K = 64, 32, 16, 5
LENGTHS = (5, 40, 23, 61)  # of prompts: within the window and far beyond it
LIMITS = [12, 20, 9, 16]
COMMON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": HEAD, "max_position_embeddings": 256,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@dataclass(frozen=True)
class Case:
    """A verifier of a family, and a draft for it.

    Attributes:
        name: transformers' name of the family: of its config and its class.
        config: beside `COMMON`.
        draft: changes of the draft, beside its method.
        engine: arguments of the engine.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    method: str = "dflash"
    draft: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=lambda: dict(EAGER))

    @property
    def architecture(self) -> str:
        return f"{self.name}ForCausalLM"


@dataclass(frozen=True)
class Pair:
    """A saved verifier and draft, and the verifier's own text."""

    verifier: CausalVerifier
    checkpoint: Checkpoint
    text: OwnText
    request: Request


def config_of(case: Case) -> Any:
    """The config of a case's verifier."""
    kind = getattr(transformers, f"{case.name}TextConfig", None) or getattr(transformers, f"{case.name}Config")
    return kind(**{**COMMON, **case.config})


def save_verifier(case: Case, folder: Path) -> None:
    """A model with random weights, also in its norms: norms of one hide faults."""
    torch.manual_seed(3)
    model = getattr(transformers, case.architecture)(config_of(case))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def pair_of(case: Case, folder: Path) -> Pair:
    """Make a case's verifier and draft, and ask the reference engine for the text."""
    save_verifier(case, folder / "verifier")
    verifier = load_verifier(str(folder / "verifier"), torch.float32)
    shape = {
        "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": HEAD, "target_layer_ids": (0, 2, LAYERS),
        "vocab_size": VOCAB, "draft_vocab_size": VOCAB,
    }  # fmt: skip
    config = dataclasses.replace(tiny_config(case.method), **{**shape, **case.draft})
    draft = tiny_draft(verifier, config)
    save_draft(folder / "draft", draft, contract_of(draft, verifier), torch.float32, {})
    checkpoint = Checkpoint(folder / "draft", *load_draft(folder / "draft", verifier, torch.float32))
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    plain = DecodingEngine(verifier, None, 0, SamplingSettings(max_new_tokens=max(LIMITS))).generate(prompts, 4)
    replies = [reply.tokens[:limit] for reply, limit in zip(plain, LIMITS, strict=True)]
    request = Request(
        verifier=str(folder / "verifier"), prompts=prompts, stop_ids=sorted(verifier.stop_ids), max_tokens=LIMITS,
        dtype="float32", max_num_seqs=3, max_model_len=128, engine={**DETAILED, **case.engine},
        speculative=speculative_config(checkpoint.folder, checkpoint.contract, K, v1_runner=True),
    )  # fmt: skip
    return Pair(verifier, checkpoint, OwnText(prompts, replies), request)


def serve(pairs: list[Pair]) -> list[Decoded]:
    """All of them in one child of vLLM."""
    return decode([pair.request for pair in pairs], engine_environment(1, cpu=True, v1_runner=True))


def require_as_trained(name: str, pair: Pair, served: Decoded) -> None:
    """The verifier's own text, and every block the trainer's."""
    assert [reply.tokens for reply in served.replies] == pair.text.replies, name
    assert sum(len(blocks) for blocks in served.blocks.values()) > len(LENGTHS), name
    assert not findings_of(served, pair.checkpoint, pair.verifier, pair.text, K), name
