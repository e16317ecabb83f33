"""The real verifier as vLLM serves it, drafts for it, and the verifier's own text."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from assets.once import made_once
from blockdraft.checkpoints.store import load_draft, save_draft
from blockdraft.contract import Contract
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.decoding.one_pass import document_proposals
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.config import DraftConfig
from blockdraft.pipeline.loading import encode_all
from blockdraft.pipeline.train import train
from blockdraft.records import Document
from blockdraft.serving.launcher import engine_environment, speculative_config
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.serving.parity import Finding, blocks_of, compare_counters, compare_reply
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.trainer import BEST
from blockdraft.verifiers.causal import CausalVerifier
from conftest import contract_of, own_replies, tiny_config, tiny_draft

LIMITS = [4, 17, 9, 25, 12, 20]  # by prompt: replies end at different times
EAGER = {"enforce_eager": True}


@dataclass(frozen=True)
class OwnText:
    """Prompts and what the verifier says to them."""

    prompts: list[list[int]]
    replies: list[list[int]]


@pytest.fixture(scope="session")
def own_text(real_verifier: CausalVerifier) -> OwnText:
    records, chat = (workload_prompts(name)[1] for name in ("records", "chat"))
    prompts = encode_all(real_verifier, [*records[:4], *chat[:2]])
    sampling = SamplingSettings(max_new_tokens=max(LIMITS))
    plain = DecodingEngine(real_verifier, None, 0, sampling).generate(prompts, 6)
    return OwnText(prompts, [r.tokens[:limit] for r, limit in zip(plain, LIMITS, strict=True)])


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    draft: BlockDraft
    contract: Contract


def real_config(method: str, **changes: object) -> DraftConfig:
    """A small draft for SmolLM2-135M."""
    widths: dict[str, object] = {
        "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "intermediate_size": 256,
        "rms_norm_eps": 1e-5, "vocab_size": 49152, "draft_vocab_size": 49152, "tap_ids": (2, 15, 30),
        "mask_token_id": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "max_position_embeddings": 8192,
    }  # fmt: skip
    return dataclasses.replace(tiny_config(method), **{**widths, **changes})


@pytest.fixture(scope="session")
def random_checkpoint(
    real_verifier: CausalVerifier, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[DraftConfig], Checkpoint]:
    """Saved drafts with random weights, and norms that are not one: untrained norms of one hide faults."""
    made: dict[str, Checkpoint] = {}

    def make(config: DraftConfig) -> Checkpoint:
        key = str(config)
        if key not in made:
            draft = tiny_draft(real_verifier, config, zlib.crc32(key.encode()))  # whichever test asks first
            contract = contract_of(draft, real_verifier)
            folder = tmp_path_factory.mktemp("drafts") / contract.method
            save_draft(folder, draft, contract, torch.float32, {})
            made[key] = Checkpoint(folder, *load_draft(folder, real_verifier, torch.float32))
        return made[key]

    return make


@pytest.fixture(scope="session")
def trained_checkpoint(real_verifier: CausalVerifier, shared_root: Path) -> Callable[[str], Checkpoint]:
    """Drafts trained for some tens of steps on the verifier's own replies, one of each method."""

    def data(folder: Path) -> None:
        own_replies(real_verifier, "records=builtin/records@48", folder / "prompts", folder / "data", 64)

    def make(method: str) -> Checkpoint:
        def trained(folder: Path) -> None:
            settings = TrainSettings(
                verifier_name_or_path=real_verifier.identity.name, dtype="float32",
                data_path=made_once(shared_root / "real-data", data) / "data", save_path=folder / "run",
                speculator_type=method, mask_token_id=4, logger="none", total_seq_len=1024, epochs=3.0,
                max_anchors=96, num_layers=1,
            )  # fmt: skip
            train(settings, real_verifier)

        folder = made_once(shared_root / f"real-{method}", trained) / "run" / BEST
        return Checkpoint(folder, *load_draft(folder, real_verifier, torch.float32))

    return functools.cache(make)


@pytest.fixture(scope="session")
def serve_offline(real_folder: Path, own_text: OwnText, real_verifier: CausalVerifier) -> Callable[..., list[Decoded]]:
    """Decode the prompts by vLLM, four at a time, with each draft and K; one child runs all of its engines."""

    def serve(*pairs: tuple[Checkpoint, int], by_folder: bool = False, **changes: object) -> list[Decoded]:
        def request(checkpoint: Checkpoint, k: int) -> Request:
            return Request(
                verifier=str(checkpoint.folder if by_folder else real_folder),
                prompts=own_text.prompts,
                stop_ids=sorted(real_verifier.stop_ids),
                max_tokens=LIMITS,
                dtype="float32",
                max_num_seqs=4,
                max_model_len=512,
                speculative=None
                if by_folder
                else speculative_config(checkpoint.folder, checkpoint.contract, k, v1_runner=True),
                engine=EAGER | DETAILED,
            )

        requests = [dataclasses.replace(request(*pair), **changes) for pair in pairs]
        return decode(requests, engine_environment(0, cpu=True, v1_runner=True))

    return serve


def findings_of(
    served: Decoded, checkpoint: Checkpoint, verifier: CausalVerifier, text: OwnText, k: int
) -> list[Finding]:
    """Every block, agreed count and counter against the trainer's forward; the text is compared by the tests."""
    found = compare_counters(served.replies, served.counters, k)
    for index, (prompt, reply) in enumerate(zip(text.prompts, served.replies, strict=True)):
        document = Document.of_reply(str(index), prompt, reply.tokens, "length")
        proposals = document_proposals(verifier, checkpoint.draft, document, k)
        blocks = blocks_of(reply, served.blocks)
        found += compare_reply("vllm", index, prompt, reply, proposals, blocks, lambda *_: None, 0.0)
    return found
