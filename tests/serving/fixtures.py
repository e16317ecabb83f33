"""Verifiers as vLLM serves them, the real one and a random one, drafts for them, and their own text."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assets.once import made_once
from blockdraft.checkpoints.store import load_draft, save_draft
from blockdraft.contract import Contract
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.decoding.one_pass import example_proposals
from blockdraft.draft_config import DraftConfig
from blockdraft.models.block_draft import BlockDraft
from blockdraft.pipeline.loading import encode_all
from blockdraft.pipeline.train import train
from blockdraft.records import Example
from blockdraft.serving.launcher import engine_environment, speculative_config
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.serving.parity import Finding, blocks_of, compare_counters, compare_reply
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.run_folder import BEST
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.loading import save_folder
from conftest import contract_of, own_replies, tiny_config, tiny_draft, tiny_tokenizer

LIMITS = [4, 17, 9, 25, 12, 20]  # by prompt: replies end at different times
EAGER = {"enforce_eager": True}
SERVED_VOCAB = 1000  # no multiple of 64, to which the engine fills up
HEAD_DIM = 32  # the smallest that the engine's attention on CPUs computes


@dataclass(frozen=True)
class OwnText:
    """Prompts and what the verifier says to them."""

    prompts: list[list[int]]
    replies: list[list[int]]


@dataclass(frozen=True)
class Speaker:
    """A verifier in a folder, for the engine, and what it says."""

    folder: Path
    verifier: CausalVerifier
    text: OwnText


def own_text_of(verifier: CausalVerifier, prompts: list[list[int]]) -> OwnText:
    sampling = SamplingSettings(max_new_tokens=max(LIMITS))
    plain = DecodingEngine(verifier, None, 0, sampling).generate(prompts, 6)
    return OwnText(prompts, [r.tokens[:limit] for r, limit in zip(plain, LIMITS, strict=True)])


@pytest.fixture(scope="session")
def own_text(real_verifier: CausalVerifier) -> OwnText:
    records, chat = (workload_prompts(name)[1] for name in ("records", "chat"))
    return own_text_of(real_verifier, encode_all(real_verifier, [*records[:4], *chat[:2]]))


@pytest.fixture(scope="session")
def real_speaker(real_folder: Path, real_verifier: CausalVerifier, own_text: OwnText) -> Speaker:
    return Speaker(real_folder, real_verifier, own_text)


def random_llama(folder: Path, vocab_size: int) -> CausalVerifier:
    """A random Llama that the engine serves, saved in a folder: what no test of real text needs, starts sooner."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=512, initializer_range=0.3, eos_token_id=1,
        pad_token_id=0, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = 1
    save_folder(CausalVerifier(model, tiny_tokenizer(), str(folder)), folder)
    return CausalVerifier(model, tiny_tokenizer(), str(folder))


@pytest.fixture(scope="session")
def random_speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    folder = tmp_path_factory.mktemp("random") / "verifier"
    verifier = random_llama(folder, SERVED_VOCAB)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (40, 61, 7, 90, 33, 110)]
    text = own_text_of(verifier, prompts)
    assert min(len(set(reply)) for reply in text.replies) > 3  # not one token over and over
    return Speaker(folder, verifier, text)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    draft: BlockDraft
    contract: Contract


def served_config(method: str, **changes: object) -> DraftConfig:
    """A draft for the random Llama."""
    widths: dict[str, object] = {
        "head_dim": HEAD_DIM, "vocab_size": SERVED_VOCAB, "draft_vocab_size": SERVED_VOCAB,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return dataclasses.replace(tiny_config(method), **{**widths, **changes})


@pytest.fixture(scope="session")
def random_checkpoint(
    random_speaker: Speaker, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[DraftConfig], Checkpoint]:
    """Saved drafts with random weights, and norms that are not one: untrained norms of one hide faults."""

    made: dict[str, Checkpoint] = {}

    def make(config: DraftConfig) -> Checkpoint:
        key, verifier = str(config), random_speaker.verifier
        if key not in made:
            draft = tiny_draft(verifier, config, zlib.crc32(key.encode()))  # the same whichever test asks first
            contract = contract_of(draft, verifier)
            folder = tmp_path_factory.mktemp("drafts") / contract.draft.method
            save_draft(folder, draft, contract, torch.float32, {})
            made[key] = Checkpoint(folder, *load_draft(folder, verifier, torch.float32))
        return made[key]

    return make


@pytest.fixture(scope="session")
def trained_checkpoint(real_verifier: CausalVerifier, shared_root: Path) -> Callable[[str], Checkpoint]:
    """Drafts trained for some tens of steps on the verifier's own replies; DFlash in the whole vocabulary."""

    def data(folder: Path) -> None:
        own_replies(real_verifier, "records=builtin/records@48", folder / "prompts", folder / "data", 64)

    def make(method: str) -> Checkpoint:
        def trained(folder: Path) -> None:
            settings = TrainSettings(
                verifier_name_or_path=real_verifier.identity.name, dtype="float32",
                data_path=made_once(shared_root / "real-data", data) / "data", save_path=folder / "run",
                speculator_type=method, draft_vocab_size=None if method == "dflash" else 2000, mask_token_id=4,
                logger="none", total_seq_len=1024, epochs=3.0, max_anchors=96, num_layers=1,
                lr=2e-3, muon_lr=4e-2,
            )  # fmt: skip
            train(settings, real_verifier)

        folder = made_once(shared_root / f"real-{method}", trained) / "run" / BEST
        return Checkpoint(folder, *load_draft(folder, real_verifier, torch.float32))

    return functools.cache(make)


def request_of(speaker: Speaker, checkpoint: Checkpoint, k: int, by_folder: bool = False, **changes: object) -> Request:
    """The speaker's prompts through vLLM, four at a time; `by_folder`: the engine finds the verifier by the draft."""
    speculative = speculative_config(checkpoint.folder, checkpoint.contract, k, v1_runner=True)
    request = Request(
        verifier=str(checkpoint.folder if by_folder else speaker.folder),
        prompts=speaker.text.prompts,
        stop_ids=sorted(speaker.verifier.stop_ids),
        max_tokens=LIMITS,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=512,
        speculative=None if by_folder else speculative,
        engine=EAGER | DETAILED,
    )
    return dataclasses.replace(request, **changes)


def served(requests: Sequence[Request]) -> list[Decoded]:
    """One child runs an engine for each."""
    return decode(requests, engine_environment(0, cpu=True, v1_runner=True))


def findings_of(
    answer: Decoded, checkpoint: Checkpoint, verifier: CausalVerifier, text: OwnText, k: int
) -> list[Finding]:
    """Every block, accepted count and counter against the trainer's forward; the text is compared by the tests."""
    found = compare_counters(answer.replies, answer.counters, k)
    for index, (prompt, reply) in enumerate(zip(text.prompts, answer.replies, strict=True)):
        example = Example.of_reply(str(index), prompt, reply.tokens, "length")
        proposals = example_proposals(verifier, checkpoint.draft, example, k)
        blocks = blocks_of(reply, answer.blocks)
        found += compare_reply("vllm", index, prompt, reply, proposals, blocks, lambda *_: None, 0.0)
    return found
