"""Fixtures: a tiny random verifier of four layers, tiny drafts, and the real SmolLM2-135M-Instruct."""

from __future__ import annotations

import os

from blockdraft.runtime import prepare_environment

prepare_environment()
os.environ["HF_HUB_OFFLINE"] = "1"  # tests never reach for a hub
IS_ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ
if IS_ONE_OF_SEVERAL:
    os.environ["OMP_NUM_THREADS"] = "1"  # processes side by side, and engines they start: a core each

import dataclasses  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import socket  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Gemma2Config,
    T5Gemma2ForConditionalGeneration,
)

from assets.once import made_once  # noqa: E402
from blockdraft.checkpoints.speculators import DIGEST  # noqa: E402
from blockdraft.checkpoints.store import CONFIG, WEIGHTS, digest  # noqa: E402
from blockdraft.cli.main import run  # noqa: E402
from blockdraft.contract import Contract  # noqa: E402
from blockdraft.draft_config import DraftConfig  # noqa: E402
from blockdraft.models.block_draft import BlockDraft  # noqa: E402
from blockdraft.pipeline.prepare import prepare  # noqa: E402
from blockdraft.pipeline.regenerate import regenerate  # noqa: E402
from blockdraft.presets import PRESETS  # noqa: E402
from blockdraft.records import Example  # noqa: E402
from blockdraft.settings import PrepareSettings, RegenerateSettings  # noqa: E402
from blockdraft.training.creation import make_contract  # noqa: E402
from blockdraft.verifiers.base import Verifier  # noqa: E402
from blockdraft.verifiers.causal import CausalVerifier  # noqa: E402
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier  # noqa: E402
from blockdraft.verifiers.loading import EMBEDDED, load_verifier, save_folder  # noqa: E402

pytest_plugins = ["serving.fixtures", "assets.fixtures"]  # what tests of served drafts share

VOCAB, HIDDEN, LAYERS, MASK = 128, 32, 4, 100
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)

torch.set_num_threads(1 if IS_ONE_OF_SEVERAL else 2)
# Tests never assert a time; hypothesis would, by default.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: the short ones at the end keep all processes busy until then."""
    heavy = ("engine", "real", "asset")
    long_files = {item.path for item in items if any(item.get_closest_marker(name) for name in heavy)}
    items.sort(key=lambda item: item.path not in long_files)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """97 words (w0 .. w93, and three control words); ids 97 to 127 are unused rows of the padded vocabulary."""
    words = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(93)), "assistant"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.3,
}


def tiny_model(kind: str) -> PreTrainedModel:
    """A random causal language model of one of several families."""
    torch.manual_seed(1)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=False))
    if kind == "llama_tied":
        return LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=True))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_COMMON))
    if kind == "mistral_window":
        return MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=4))
    if kind == "gemma3":
        config = Gemma3TextConfig(
            **_COMMON,
            sliding_window=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            final_logit_softcapping=5.0,
        )
        return Gemma3ForCausalLM(config)
    raise KeyError(kind)


FAMILIES = ("llama", "llama_tied", "qwen3", "mistral_window", "gemma3")


def tiny_verifier_of(kind: str, dtype: torch.dtype = torch.float32) -> CausalVerifier:
    model = tiny_model(kind).to(dtype)
    model.generation_config.eos_token_id = 1
    verifier = CausalVerifier(model, tiny_tokenizer(), f"tiny-{kind}")
    verifier.prove()
    return verifier


EOI, IMAGE, BOI = 101, 102, 103  # tokens that stand for images in a T5Gemma 2


def tiny_encoder_decoder(dtype: torch.dtype = torch.float32) -> EncoderDecoderVerifier:
    """A random T5Gemma 2 whose norms, image-end row, windows and soft cap all matter."""
    torch.manual_seed(1)
    text = {
        **_COMMON,
        "bos_token_id": 2,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 5.0,
    }
    encoder = {**text, "num_hidden_layers": 3, "layer_types": text["layer_types"][1:], "max_position_embeddings": 64}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 4, "patch_size": 2}  # fmt: skip
    config = T5Gemma2Config(
        encoder={"text_config": encoder, "vision_config": vision, "mm_tokens_per_image": 4, "eoi_token_index": EOI,
                 "boi_token_index": BOI},
        decoder=text, image_token_index=IMAGE,
    )  # fmt: skip
    model = T5Gemma2ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "vision" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
        # Random tables of this width would make nearly every text one repeated token.
        model.lm_head.out_proj.weight.mul_(0.3)
    verifier = EncoderDecoderVerifier(model.to(dtype), tiny_tokenizer(), "tiny-t5gemma2")
    verifier.prove()
    return verifier


@pytest.fixture(scope="session")
def tiny_seq2seq() -> EncoderDecoderVerifier:
    return tiny_encoder_decoder()


@pytest.fixture(scope="session")
def tiny_verifier() -> CausalVerifier:
    return tiny_verifier_of("llama")


def tiny_config(method: str = "dflash", **changes: object) -> DraftConfig:
    base = DraftConfig(
        hidden_size=HIDDEN,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        target_layer_ids=(0, 2, 4),
        **dataclasses.asdict(PRESETS[method].components),
        markov_rank=12 if PRESETS[method].components.sequential_head != "none" else 0,
        standardize_taps=True,
        block_size=8,
        mask_token_id=MASK,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=256,
        windows=(None, None),
        causal=(False, False),
    )
    return dataclasses.replace(base, **changes)


def tiny_draft(verifier: Verifier, config: DraftConfig, seed: int = 0) -> BlockDraft:
    """A draft with random weights and norms that are not one: norms of one hide faults."""
    draft = BlockDraft(config).to(verifier.device)
    generator = torch.Generator().manual_seed(seed + 1)
    if draft.vocabulary is not None:
        kept = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        draft.vocabulary.keep(kept.sort().values.to(verifier.device))
    draft.share(verifier.embed, verifier.head_VE)
    draft.initialise(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim == 1 and name != "norm.weight":
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(verifier.device))
            elif parameter.ndim == 2 and "fusion_weights" not in name:
                parameter.mul_(8)
        if draft.fusion.statistics is not None:
            sides = verifier.sides(list(range(8, 60)), "prompt")
            source = [] if sides.encoder is None else [sides.encoder]
            taps = verifier.states([torch.arange(3, 60)], config.target_layer_ids, source)[0].taps
            draft.fusion.statistics.calibrate(taps)
    return draft.eval()


def contract_of(draft: BlockDraft, verifier: Verifier) -> Contract:
    """The contract of a draft, its vocabulary map included."""
    return make_contract(draft.config, verifier, None if draft.vocabulary is None else draft.vocabulary.ids)


def rewrite(
    folder: Path, tensors: dict[str, torch.Tensor] | None = None, config: dict | None = None, sign: bool = True
) -> None:
    """Change a checkpoint in place; signed, as an exporter with a fault would leave it, or as somebody who edits it."""
    stated = json.loads((folder / CONFIG).read_text()) if config is None else config
    kept = load_file(folder / WEIGHTS) if tensors is None else tensors
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps({**stated, DIGEST: digest(stated, kept)} if sign else stated))


def own_replies(verifier: Verifier, source: str, prompts: Path, data: Path, max_new_tokens: int) -> None:
    """Prepare a source and let the verifier write its replies, greedily."""
    name, dtype = verifier.identity.name, str(verifier.dtype).removeprefix("torch.")
    prepare(PrepareSettings(verifier_name_or_path=name, source=(source,), save_path=prompts, prompts_only=True))
    settings = RegenerateSettings(
        verifier_name_or_path=name, dtype=dtype, data_path=prompts, save_path=data, max_new_tokens=max_new_tokens
    )
    regenerate(settings, verifier)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """A command in this process: exit code, stdout, stderr."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """The lines that the package has logged since the last call."""
    caplog.set_level(logging.INFO, "blockdraft")

    def lines() -> str:
        text = "".join(f"{record.getMessage()}\n" for record in caplog.records if record.name == "blockdraft")
        caplog.clear()
        return text

    return lines


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def random_example(length: int, reply_start: int, seed: int, name: str | None = None) -> Example:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 96, (length,), generator=generator).tolist()
    return Example.of_reply(name or f"doc{seed}", ids[:reply_start], ids[reply_start:], "length")


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run see; for `made_once`."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if IS_ONE_OF_SEVERAL else own) / "shared"


@pytest.fixture(scope="session")
def real_folder(shared_root: Path) -> Path:
    """SmolLM2-135M-Instruct, unpacked from its GGUF into an ordinary folder."""
    return made_once(
        shared_root / "real-verifier", lambda folder: save_folder(load_verifier(EMBEDDED, torch.float32), folder)
    )


@pytest.fixture(scope="session")
def real_verifier(real_folder: Path) -> CausalVerifier:
    return load_verifier(str(real_folder), torch.float32)
