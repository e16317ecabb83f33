"""A server that runs another draft than the trainer's forward is found out by parity, whatever the difference.

The text stays right, as the verifier decides it; nothing but the comparison of ids can tell. Each case is a signed copy
with one fact changed, as an exporter or an engine with a fault would use it; the trainer's forward has the original.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.store import CONFIG, WEIGHTS
from blockdraft.models.vocabulary import map_digest
from conftest import MASK, rewrite
from serving.fixtures import HEAD_DIM, Checkpoint, Speaker, findings_of, request_of, served, served_config

pytestmark = pytest.mark.engine
K = 3


def taps(config: dict, _: dict) -> None:
    config["aux_hidden_state_layer_ids"] = config["blockdraft"]["draft"]["target_layer_ids"] = [0, 3, 4]


def mask(config: dict, _: dict) -> None:
    config["mask_token_id"] = config["blockdraft"]["draft"]["mask_token_id"] = MASK + 1


def rotary(config: dict, _: dict) -> None:
    for place in (config["blockdraft"]["draft"], config["transformer_layer_config"]):
        place["rope_parameters"]["rope_theta"] = 1000.0
    config["transformer_layer_config"]["rope_theta"] = 1000.0


def causality(config: dict, _: dict) -> None:
    config["sliding_window_non_causal"] = False
    config["blockdraft"]["draft"]["causal"] = [True, True]


def norm(_: dict, tensors: dict) -> None:
    tensors["layers.1.self_attn.k_norm.weight"] *= torch.linspace(0.2, 3, HEAD_DIM)


def vocabulary(config: dict, tensors: dict) -> None:
    """As many other ids: each proposed token means another one."""
    kept = tensors["t2d"].nonzero()[:, 0]
    other = (~tensors["t2d"]).nonzero()[:, 0][: len(kept)]
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, other, True)
    tensors["d2t"] = other - torch.arange(len(other))
    config["blockdraft"]["vocab_map_hash"] = map_digest(other, len(tensors["t2d"]))


CHANGES = {f.__name__: f for f in (taps, mask, rotary, causality, norm, vocabulary)}


def test_every_changed_fact_is_found(
    random_checkpoint: Callable[..., Checkpoint], random_speaker: Speaker, tmp_path: Path
) -> None:
    original = random_checkpoint(served_config("dflash", draft_vocab_size=300))
    drafts = []
    for name, change in CHANGES.items():
        folder = Path(shutil.copytree(original.folder, tmp_path / name))
        config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
        change(config, tensors)
        rewrite(folder, tensors, config)
        drafts.append(dataclasses.replace(original, folder=folder))
    answers = served([request_of(random_speaker, draft, K) for draft in [*drafts, original]])
    text = random_speaker.text
    for name, answer in zip([*CHANGES, None], answers, strict=True):
        assert [reply.tokens for reply in answer.replies] == text.replies, name
        found = findings_of(answer, original, random_speaker.verifier, text, K)
        assert bool(found) == (name is not None), name
        assert all(finding.stage == "proposed tokens" for finding in found), name
