"""What checks of a device share: the same verifiers, texts and training on the device and on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blockdraft.records import Example
from blockdraft.settings import TrainSettings
from blockdraft.training.plan import TrainingPlan
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import LoadedVerifier
from conftest import random_example, tiny_encoder_decoder, tiny_verifier_of

MASK, TAPS = 100, (0, 2, 4)
EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(8)]
PROMPTS = [random_example(n, 1, n).input_ids for n in (3, 30, 17)]
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # sums of a step in another order


@functools.cache
def verifier_on(device: str, kind: str = "llama", dtype: torch.dtype = torch.float32) -> LoadedVerifier:
    """A tiny verifier on a device: the same weights for the same kind."""
    if device == "cpu":
        return tiny_encoder_decoder(dtype) if kind == "t5gemma2" else tiny_verifier_of(kind, dtype)
    twin = verifier_on("cpu", kind, dtype)
    loaded = EncoderDecoderVerifier if kind == "t5gemma2" else CausalVerifier
    moved = loaded(copy.deepcopy(twin.model).to(device), twin.tokenizer, twin.identity.name)
    moved.prove()
    return moved


def examples_for(verifier: LoadedVerifier) -> list[Example]:
    """Texts to train on, with sources where the verifier has an encoder."""
    if not verifier.has_encoder:
        return EXAMPLES
    return [
        Example.of_reply(each.id, [2], each.input_ids[8:], "length", source_ids=each.input_ids[:8]) for each in EXAMPLES
    ]


def plan_of(verifier: LoadedVerifier, folder: Path, **changes: object) -> TrainingPlan:
    """A plan of training with tiny settings."""
    settings = {
        "dtype": "float32", "device": str(verifier.device), "data_path": folder, "save_path": folder / "run",
        "logger": "none", "target_layer_ids": TAPS, "epochs": 2.0, "total_seq_len": 80, "max_anchors": 12,
        "mask_token_id": MASK, "train_data_ratio": 0.7, "block_size": 5, "num_layers": 2, "compile": "off",
        "lr": 2e-3, "muon_lr": 4e-2,
    }  # fmt: skip
    return TrainingPlan(TrainSettings(**{**settings, **changes}), verifier, examples_for(verifier))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Check:
    """A named check: `run(device, folder)` raises where something is wrong."""

    name: str
    run: Callable[[str, Path], None]


def require_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """A tensor of the device against the CPU's."""
    assert wanted.device.type == "cpu"
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), **CLOSE)
