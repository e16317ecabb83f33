"""The small T5Gemma 2 as a verifier, its held-out sources, and drafts for it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from assets.once import made_once
from assets.t5gemma2 import PAIRS, Asset, small_t5gemma2
from blockdraft.checkpoints.store import load_draft, save_draft
from blockdraft.contract import Contract
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.draft_config import DraftConfig
from blockdraft.models.block_draft import BlockDraft
from blockdraft.pipeline.train import train
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.run_folder import BEST
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import load_verifier
from conftest import contract_of, own_replies, tiny_config, tiny_draft

LONGEST = 64  # more tokens than any of its texts has


@dataclass(frozen=True)
class SmallDraft:
    folder: Path
    draft: BlockDraft
    contract: Contract


@pytest.fixture(scope="session")
def small_asset() -> Asset:
    return small_t5gemma2()


@pytest.fixture(scope="session")
def small_verifier(small_asset: Asset) -> EncoderDecoderVerifier:
    verifier = load_verifier(str(small_asset.verifier), torch.float32)
    assert isinstance(verifier, EncoderDecoderVerifier)
    return verifier


@pytest.fixture(scope="session")
def heldout_sources(small_asset: Asset, small_verifier: EncoderDecoderVerifier) -> list[list[int]]:
    """Token ids of a hundred sources: those held out, and supervised ones behind them where real pairs have fewer."""
    lines = [line for path in (small_asset.heldout, small_asset.train) for line in path.read_text().splitlines()]
    return [small_verifier.tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[:100]]


@pytest.fixture(scope="session")
def small_replies(small_verifier: EncoderDecoderVerifier, heldout_sources: list[list[int]]) -> list[Reply]:
    """What the reference engine makes of them without a draft."""
    return DecodingEngine(small_verifier, None, 0, SamplingSettings(max_new_tokens=LONGEST)).generate(
        heldout_sources, 25
    )


def small_config(method: str, **changes: object) -> DraftConfig:
    """A draft of random weights for the small T5Gemma 2."""
    widths: dict[str, object] = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 256,
        "vocab_size": 1500, "draft_vocab_size": 1500, "target_layer_ids": (1, 3, 6), "mask_token_id": 4,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return dataclasses.replace(tiny_config(method), **{**widths, **changes})


@pytest.fixture(scope="session")
def small_random_draft(
    small_verifier: EncoderDecoderVerifier, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SmallDraft]:
    def make(method: str, **changes: object) -> SmallDraft:
        draft = tiny_draft(small_verifier, small_config(method, **changes), len(method))
        contract = contract_of(draft, small_verifier)
        folder = tmp_path_factory.mktemp("small-drafts") / method
        save_draft(folder, draft, contract, torch.float32, {})
        return SmallDraft(folder, *load_draft(folder, small_verifier, torch.float32))

    return make


@pytest.fixture(scope="session")
def small_trained_draft(small_asset: Asset, small_verifier: EncoderDecoderVerifier, shared_root: Path) -> SmallDraft:
    """A DFlare draft trained for half a minute; real pairs need more than made-up ones."""
    rows = 1000 if PAIRS in os.environ else 500
    count = min(rows, len(small_asset.train.read_text().splitlines()))

    def trained(folder: Path) -> None:
        data = folder / "data"
        own_replies(small_verifier, f"pairs={small_asset.train}@{count}", folder / "prompts", data, LONGEST)
        settings = TrainSettings(
            verifier_name_or_path=str(small_asset.verifier), dtype="float32", data_path=data,
            save_path=folder / "draft", speculator_type="dflare", logger="none", total_seq_len=1024,
            epochs=4 * rows / count, max_anchors=256, num_layers=2, lr=2e-3, muon_lr=4e-2,
        )  # fmt: skip
        train(settings, small_verifier)

    folder = made_once(shared_root / "small-trained", trained) / "draft" / BEST
    return SmallDraft(folder, *load_draft(folder, small_verifier, torch.float32))
