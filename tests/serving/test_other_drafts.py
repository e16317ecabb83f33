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
from blockdraft.models.vocabulary import map_hash
from blockdraft.serving.launcher import engine_environment, speculative_config
from blockdraft.serving.offline import DETAILED, Request, decode
from blockdraft.verifiers.causal import CausalVerifier
from conftest import rewrite
from serving.fixtures import EAGER, LIMITS, Checkpoint, OwnText, findings_of, real_config

pytestmark = [pytest.mark.real, pytest.mark.engine]
K = 3


def taps(config: dict, _: dict) -> None:
    config["aux_hidden_state_layer_ids"] = config["blockdraft"]["tap_ids"] = [2, 16, 30]


def mask(config: dict, _: dict) -> None:
    config["mask_token_id"] = config["blockdraft"]["mask_token_id"] = 5


def rotary(config: dict, _: dict) -> None:
    for place in (config["blockdraft"], config["transformer_layer_config"]):
        place["rope_parameters"]["rope_theta"] = 1000.0
    config["transformer_layer_config"]["rope_theta"] = 1000.0


def causality(config: dict, _: dict) -> None:
    config["sliding_window_non_causal"] = False
    config["blockdraft"]["causal"] = [True, True]


def norm(_: dict, tensors: dict) -> None:
    tensors["layers.1.self_attn.k_norm.weight"] *= torch.linspace(0.2, 3, 64)


def vocabulary(config: dict, tensors: dict) -> None:
    """As many other ids: each proposed token means another one."""
    kept = tensors["t2d"].nonzero()[:, 0]
    other = (~tensors["t2d"]).nonzero()[:, 0][: len(kept)]
    tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill(0, other, True)
    tensors["d2t"] = other - torch.arange(len(other))
    config["blockdraft"]["vocab_map_hash"] = map_hash(other, len(tensors["t2d"]))


CHANGES = {f.__name__: f for f in (taps, mask, rotary, causality, norm, vocabulary)}


def test_every_changed_fact_is_found(
    random_checkpoint: Callable[..., Checkpoint], real_verifier: CausalVerifier, real_folder: Path, own_text: OwnText,
    tmp_path: Path,
) -> None:  # fmt: skip
    original = random_checkpoint(real_config("dflash", draft_vocab_size=1500))
    requests = []
    for name, change in CHANGES.items():
        folder = Path(shutil.copytree(original.folder, tmp_path / name))
        config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
        change(config, tensors)
        rewrite(folder, tensors, config)
        requests.append(
            Request(
                verifier=str(real_folder), prompts=own_text.prompts, stop_ids=sorted(real_verifier.stop_ids),
                max_tokens=LIMITS, dtype="float32", max_num_seqs=4, max_model_len=512,
                speculative=speculative_config(folder, original.contract, K, v1_runner=True), engine=EAGER | DETAILED,
            )
        )  # fmt: skip
    requests.append(dataclasses.replace(requests[0], speculative=speculative_config(
        original.folder, original.contract, K, v1_runner=True)))  # fmt: skip
    answers = decode(requests, engine_environment(0, cpu=True, v1_runner=True))
    for name, served in zip([*CHANGES, None], answers, strict=True):
        assert [reply.tokens for reply in served.replies] == own_text.replies, name
        found = findings_of(served, original, real_verifier, own_text, K)
        assert bool(found) == (name is not None), name
        assert all(finding.stage == "proposed tokens" for finding in found), name
