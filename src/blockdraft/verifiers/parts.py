"""The parts of a verifier that training reads: embedding, output head and final norm, with its text side.

Nothing else of its weights is read but its norms (vectors) and a few rows of its matrices, for its identity; matrices
of its layers may be absent from the files. So a verifier of any size costs the trainer its two tables, and a family
that `verifiers.loading` cannot drive (linear attention, multimodal classes, quantized layers) can be trained for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from blockdraft.contract import VerifierIdentity
from blockdraft.errors import InputError
from blockdraft.progress import LOGGER
from blockdraft.runtime import resolve_device
from blockdraft.verifiers.architecture import final_norm_of
from blockdraft.verifiers.base import LayerShape, Sides
from blockdraft.verifiers.causal import decoder_sides
from blockdraft.verifiers.encoder_decoder import check_source
from blockdraft.verifiers.hub import FIELD, is_gguf, unreadable
from blockdraft.verifiers.identity import ModelFiles, has_encoder, open_files
from blockdraft.verifiers.logits_proof import prove_logits
from blockdraft.verifiers.output_side import OutputSide
from blockdraft.verifiers.tensor_files import DTYPES
from blockdraft.verifiers.text_side import TextSide, read_text_side

SHAPE_FLAGS = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


class VerifierParts(OutputSide):
    """See `verifiers.base.TrainingVerifier`; made by `read_parts`.

    Args:
        config: of the model.
        embed: of token ids, as a draft sees them.
        shape: widths of a layer by the names of `SHAPE_FLAGS`, for configs that do not state them.
    """

    def __init__(
        self,
        identity: VerifierIdentity,
        text: TextSide,
        config: Any,
        final_norm: nn.Module,
        head_VE: Tensor,
        embed: Callable[[Tensor], Tensor],
        shape: Mapping[str, int | None],
    ) -> None:
        super().__init__(config.get_text_config(), final_norm, head_VE)
        self.identity, self.tokenizer, self.stop_ids = identity, text.tokenizer, text.stop_ids
        self.has_encoder = has_encoder(config)
        self.context_length: int = self._config.max_position_embeddings
        self._whole_config, self._start_id, self._embed, self._shape = config, text.start_id, embed, shape

    def embed(self, ids: Tensor) -> Tensor:
        return self._embed(ids)

    def sides(self, prompt: Any, name: str) -> Sides:
        if not self.has_encoder:
            return decoder_sides(prompt, name, self.context_length)
        assert self._start_id is not None
        check_source(prompt, name, self._whole_config, self.tokenizer)
        return Sides([self._start_id], list(prompt))

    def layer_shape(self) -> LayerShape:
        """As the config states it, else as `shape` does.

        Raises:
            InputError: neither does.
        """
        try:
            return super().layer_shape()
        except AttributeError as error:
            heads, width = self._shape.get("num_attention_heads"), self._shape.get("intermediate_size")
            if not heads or not width:
                raise InputError(
                    FIELD,
                    self.identity.name,
                    f"its config does not state the shape of a layer ({error}); give --num-attention-heads, --head-dim "
                    "and --intermediate-size for the draft",
                ) from None
            return LayerShape(
                num_heads=heads,
                num_kv_heads=self._shape.get("num_key_value_heads") or heads,
                head_dim=self._shape.get("head_dim") or self.identity.hidden_size // heads,
                intermediate_size=width,
                rms_norm_eps=getattr(self._config, "rms_norm_eps", None) or 1e-6,
            )


def read_parts(
    name_or_path: str,
    dtype: torch.dtype,
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    shape: Mapping[str, int | None] | None = None,
) -> VerifierParts:
    """Read the parts of a verifier from a folder, or from the hub by ranged requests.

    Args:
        dtype: compute dtype.
        device: a torch device, or "auto": CUDA where there is one, else the CPU.
        shape: `VerifierParts`.

    Raises:
        InputError: nothing there, tensors that are missing or quantized (named), or no language model.
    """
    device, start = resolve_device(device), time.monotonic()
    if is_gguf(name_or_path):
        raise InputError(FIELD, name_or_path, "a GGUF file is only read whole; unpack it or load the verifier")
    text = read_text_side(name_or_path, trust_remote_code, revision)
    # A checkpoint names its verifier; a local one must be found from any working directory.
    name = str(Path(name_or_path).resolve()) if Path(name_or_path).exists() else name_or_path
    files = open_files(name, trust_remote_code, revision)
    _require_known(files)
    identity, reader = files.identity(), _Reader(files, dtype, device)
    model = files.model
    final_norm = reader.filled(final_norm_of(model, name), "final norm")
    head_VE = reader.tensor(model.get_output_embeddings().weight, "output head")
    if has_encoder(model.config):
        embed: Callable[[Tensor], Tensor] = _without_gradient(
            reader.filled(model.get_decoder().embed_tokens, "embedding")
        )
    else:
        table_VE = reader.tensor(model.get_input_embeddings().weight, "embedding")

        def embed(ids: Tensor) -> Tensor:
            return embedding(ids, table_VE)

    parts = VerifierParts(identity, text, model.config, final_norm, head_VE, embed, shape or {})
    prove_logits(model, parts, name)
    took = time.monotonic() - start
    LOGGER.debug("parts of %s read in %s on %s: %.1f GiB in %.1f s", name, dtype, device, reader.bytes / 2**30, took)
    return parts


class _Reader:
    """Reads parameters of a model from its files; one that several modules share is read once."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, device: str) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._names: dict[int, list[str]] = {}
        for name, parameter in files.model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._read: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        """What has been read takes in memory."""
        return sum(tensor.nbytes for tensor in self._read.values())

    def tensor(self, parameter: Tensor, what: str) -> Tensor:
        """The numbers of a parameter of the model.

        Raises:
            InputError: the files do not have it as plain numbers.
        """
        key = id(parameter)
        if key not in self._read:
            self._read[key] = self._from_files(self._names[key], tuple(parameter.shape), what)
        return self._read[key]

    def _from_files(self, names: list[str], shape: tuple[int, ...], what: str) -> Tensor:
        files = self._files
        name = next((name for name in names if files.layout.is_plain(name)), names[0])
        found = files.layout.stored_under(name)
        if not found:
            raise InputError(FIELD, files.name, f"its safetensors files have no {name} ({what})")
        source, stored = found[0]
        if not files.layout.is_plain(name) or stored.dtype not in DTYPES:
            hint = "a draft shares plain numbers; take a checkpoint that leaves it unquantized"
            raise InputError(FIELD, files.name, f"its {what} is quantized ({source}, {stored.dtype}): {hint}")
        if stored.shape != shape:
            raise InputError(FIELD, files.name, f"{source} is {list(stored.shape)}, its config makes it {list(shape)}")
        try:
            return stored.whole(self._dtype).to(self._device)
        except Exception as error:  # whatever the hub's client and the file system raise
            raise unreadable(files.name, error) from error

    def filled(self, module: nn.Module, what: str) -> nn.Module:
        """transformers' own module with its weights, and with the buffers that no file holds."""
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                made: Any = nn.Parameter(self.tensor(parameter, what), requires_grad=False)
                made._is_hf_initialized = True  # to be left alone below
                part.register_parameter(name, made)
            buffers = dict(part.named_buffers(recurse=False))
            for name, buffer in buffers.items():
                part._buffers[name] = torch.empty_like(buffer, device=self._device)
            if buffers:
                self._files.model._init_weights(part)
        return module.eval()


def _without_gradient(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module as a function, which does not become a part of whoever holds it."""
    return lambda ids: module(ids)


def _require_known(files: ModelFiles) -> None:
    """Reject what is no language model with an output head that a draft can share."""
    model, config = files.model, files.model.config

    def reject(why: str) -> InputError:
        return InputError(FIELD, files.name, f"{type(model).__name__} is not supported: {why}")

    brought = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})  # by the model's own code
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if not has_encoder(config) and (
        getattr(config, "is_encoder_decoder", False) or not (config.model_type in known or brought)
    ):
        raise reject("neither a decoder-only language model nor T5Gemma 2")
    head = model.get_output_embeddings()
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList) or head is None:
        raise reject("it has no list of decoder layers below an output head")
    if getattr(head, "bias", None) is not None:
        raise reject("its output head has a bias, which drafts of this family cannot share")
    if getattr(config.get_text_config(), "max_position_embeddings", None) is None:
        raise reject("its config does not state max_position_embeddings")
