"""Which verifier is this? Its shape, its vocabulary, its norm weights and sampled rows of its matrices.

Of a loaded model, or of a folder whose large weights nobody has to read: before a server is started, it must be known
that the draft belongs to what will be served.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from blockdraft.contract import VerifierIdentity
from blockdraft.errors import InputError
from blockdraft.verifiers.hub import commit_of, require_hub_id, unreadable
from blockdraft.verifiers.matrices import Layout, digest_of_files, digest_of_model, matrices_of, sampled_rows
from blockdraft.verifiers.tensor_files import read_rows, tensors_of

ENCODER_DECODER_TYPES = frozenset({"t5gemma2"})  # model types with an encoder that a verifier is known for


def softcap_of(config: Any) -> float | None:
    """Soft cap on the logits, by the text config."""
    return getattr(config, "final_logit_softcapping", None)


def has_encoder(config: Any) -> bool:
    """Whether a model's config is that of an encoder-decoder verifier."""
    return config.model_type in ENCODER_DECODER_TYPES


def model_class(config: Any) -> Any:
    """transformers' class for models of a config; many multimodal models have no causal one."""
    if has_encoder(config):
        return AutoModelForSeq2SeqLM
    multimodal = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForImageTextToText if multimodal and not causal else AutoModelForCausalLM


def norm_names(decoder: nn.Module) -> list[str]:
    """Names of a decoder's norm weights, sorted."""
    return sorted(
        name for name, weight in decoder.named_parameters() if weight.ndim == 1 and name.endswith("norm.weight")
    )


def identity_of(model: Any, tokenizer: Any, name: str, weights: SampledWeights | None = None) -> VerifierIdentity:
    """The identity of a model; norms and layers are those of its decoder.

    Args:
        weights: what its files hold, if the model itself is without weights.
    """
    decoder = model.get_decoder()
    config = model.config.get_text_config()
    if weights is None:
        weights = SampledWeights(dict(decoder.named_parameters()), digest_of_model(model))
    return VerifierIdentity(
        name=name,
        revision=None,  # known to those who loaded it by its hub id
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        num_layers=len(decoder.layers),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        embedding="module" if has_encoder(model.config) else "table",
        tokenizer_hash=tokenizer_hash(tokenizer),
        norms_hash=_norms_hash(weights.norms, norm_names(decoder)),
        matrices_digest=weights.matrices_digest,
    )


@dataclass(frozen=True, slots=True)
class SampledWeights:
    """What of a model's weights is in its identity.

    Attributes:
        norms: its norm weights by their name in the decoder; none in families whose norms have no weights.
        matrices_digest: None where its matrices cannot be compared.
    """

    norms: Mapping[str, Tensor]
    matrices_digest: str | None


def read_identity(
    name_or_path: str, trust_remote_code: bool = False, revision: str | None = None
) -> tuple[VerifierIdentity, float | None]:
    """Identity and soft cap of a folder or hub id, reading its norms and a few rows of its matrices.

    Raises:
        InputError: nothing there, or its norms are not found.
    """
    files = open_files(name_or_path, trust_remote_code, revision)
    return files.identity(), softcap_of(files.model.config.get_text_config())


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model without weights, and where they lie.

    Attributes:
        model: on the meta device.
        name: folder or hub id.
    """

    model: Any
    tokenizer: Any
    layout: Layout
    name: str
    revision: str | None

    def identity(self) -> VerifierIdentity:
        """The identity of the model, reading its norms and a few rows of its matrices.

        Raises:
            InputError: its norms are not found, or a file is damaged.
        """
        try:
            weights = self._sampled()
        except InputError:
            raise
        except Exception as error:  # whatever the hub's client and the readers raise
            raise unreadable(self.name, error) from error
        identity = identity_of(self.model, self.tokenizer, self.name, weights)
        return dataclasses.replace(identity, revision=commit_of(self.name, self.revision))

    def _sampled(self) -> SampledWeights:
        decoder = self.model.get_decoder()
        own = next((f"{name}." for name, module in self.model.named_modules() if module is decoder), "")
        names = norm_names(decoder)
        places = [self.layout.places(own + name, [0]) for name in names]
        missing = next((name for name, found in zip(names, places, strict=True) if not found), None)
        if missing is not None:
            raise InputError("--verifier-name-or-path", self.name, f"its safetensors files have no {own}{missing}")
        norms = read_rows([place for (place,) in places])
        rows = {name: self.layout.places(name, sampled_rows(p.shape)) for name, p in matrices_of(self.model).items()}
        return SampledWeights(dict(zip(names, norms, strict=True)), digest_of_files(self.model, rows))


def open_files(name_or_path: str, trust_remote_code: bool = False, revision: str | None = None) -> ModelFiles:
    """Config, tokenizer and the headers of the weights of a folder or hub id.

    Raises:
        InputError: nothing there, or not readable.
    """
    require_hub_id(name_or_path, revision)
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(name_or_path, **origin)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **origin)
        with torch.device("meta"):
            model = model_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        stored = tensors_of(name_or_path, revision)
    except Exception as error:  # whatever the hub's client, the readers and the model's own code raise
        raise unreadable(name_or_path, error) from error
    if not stored:
        raise InputError("--verifier-name-or-path", name_or_path, "there is no safetensors file")
    return ModelFiles(model, tokenizer, Layout(model, stored), name_or_path, revision)


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
