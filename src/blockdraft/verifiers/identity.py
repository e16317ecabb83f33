"""Which verifier is this? Its shape, the hash of its vocabulary and the hash of its norm weights.

Of a loaded model, or of a folder whose large weights nobody has to read: before a server is started, it must be known
that the draft belongs to what will be served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from blockdraft.contract import VerifierIdentity
from blockdraft.errors import InputError

# Final norms that multiply by (1 + w). Everything else with "RMSNorm" in its class multiplies by w.
_PLUS_ONE_TYPES = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "qwen3_5", "qwen3_5_text", "t5gemma2_decoder"}
)
ENCODER_DECODER_TYPES = frozenset({"t5gemma2"})  # model types with an encoder that a verifier is known for


def final_norm_of(config: Any) -> str:
    """ "rms" (x * w) or "rms_plus_one" (x * (1 + w)), by the text config."""
    return "rms_plus_one" if config.model_type in _PLUS_ONE_TYPES else "rms"


def softcap_of(config: Any) -> float | None:
    """Soft cap on the logits, by the text config."""
    return getattr(config, "final_logit_softcapping", None)


def has_encoder(config: Any) -> bool:
    """Whether a model's config is that of an encoder-decoder verifier."""
    return config.model_type in ENCODER_DECODER_TYPES


def model_class(config: Any) -> Any:
    """transformers' class for models of a config."""
    return AutoModelForSeq2SeqLM if has_encoder(config) else AutoModelForCausalLM


def norm_names(decoder: nn.Module) -> list[str]:
    """Names of a decoder's norm weights, sorted."""
    return sorted(
        name for name, weight in decoder.named_parameters() if weight.ndim == 1 and name.endswith("norm.weight")
    )


def identity_of(model: Any, tokenizer: Any, name: str, norms: Mapping[str, Tensor] | None = None) -> VerifierIdentity:
    """The identity of a model; norms and layers are those of its decoder.

    Args:
        norms: weights of its norms by their name in the decoder; default: those of the model (which may be without
            weights otherwise).
    """
    decoder = model.get_decoder()
    config = model.config.get_text_config()
    return VerifierIdentity(
        name=name,
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        num_layers=len(decoder.layers),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        embedding="module" if has_encoder(model.config) else "table",
        tokenizer_hash=tokenizer_hash(tokenizer),
        norms_hash=_norms_hash(dict(decoder.named_parameters()) if norms is None else norms, norm_names(decoder)),
    )


def read_identity(name_or_path: str) -> tuple[VerifierIdentity, str, float | None]:
    """Identity, final norm and soft cap of a folder or hub id, reading no weights but its norms.

    Raises:
        InputError: nothing there, or its norms are not found.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = _download(name_or_path)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with torch.device("meta"):
            model = model_class(config).from_config(config)
        norms = _read_norms(model, folder)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError("--verifier-name-or-path", name_or_path, f"cannot be read ({line})") from error
    text = model.config.get_text_config()
    return identity_of(model, tokenizer, name_or_path, norms), final_norm_of(text), softcap_of(text)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:  # whatever the hub's client raises: no network, no such name, no permission
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError("--verifier-name-or-path", name, f"no such folder, and not to be had ({line})") from error


def _read_norms(model: Any, folder: Path) -> dict[str, Tensor]:
    """The decoder's norm weights from the folder's safetensors files."""
    decoder = model.get_decoder()
    names = norm_names(decoder)
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), path)
    own = next((f"{name}." for name, module in model.named_modules() if module is decoder), "")
    prefixes = [own]
    if not has_encoder(model.config):  # an encoder's norms have the same names, so that only the exact ones will do
        prefixes += sorted({key[: -len(names[0])] for key in where if key.endswith(f".{names[0]}")})
    prefix = next((each for each in prefixes if all(each + name in where for name in names)), None)
    if prefix is None:
        raise InputError("--verifier-name-or-path", folder, f"its safetensors files have no {own}{names[0]}")
    norms = {}
    for name in names:
        with safe_open(where[prefix + name], framework="pt") as tensors:
            norms[name] = tensors.get_tensor(prefix + name)
    return norms


def stop_ids_of(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a reply: those the generation config names, and the tokenizer's own."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of a vocabulary, 16 hex digits."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()[:16]


def _norms_hash(norms: Mapping[str, Tensor], names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode())
        digest.update(norms[name].detach().to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
