"""Saving and loading drafts: a folder with config.json, model.safetensors and provenance.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.checkpoints.speculators import FILE_NAMES, config_json, parse_config
from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.folders import read_json, replacing, write_json
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.fusion import ProjectedFusion
from blockdraft.runtime import dtype_name
from blockdraft.verifiers.base import Verifier

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"


def save_draft(
    folder: Path, draft: BlockDraft, contract: Contract, dtype: torch.dtype, provenance: dict[str, Any]
) -> None:
    """Write a checkpoint, whole or not at all."""
    with replacing(folder) as temporary:
        tensors = {name: tensor.to(dtype).contiguous() for name, tensor in exported_tensors(draft).items()}
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config_json(draft.config, contract, dtype_name(dtype)))
        write_json(temporary / PROVENANCE, provenance)


def exported_tensors(draft: BlockDraft) -> dict[str, Tensor]:
    """Tensors under their names in the file; the standardisation of a projected draft is folded into fc.weight."""
    tensors = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    if isinstance(draft.fusion, ProjectedFusion) and draft.fusion.statistics is not None:
        tensors["fusion.fc.weight"] = draft.fusion.statistics.fold(tensors["fusion.fc.weight"])
        del tensors["fusion.statistics.direction"], tensors["fusion.statistics.scale"]
    return {FILE_NAMES.get(name, name): tensor for name, tensor in tensors.items()}


def read_contract(folder: Path) -> Contract:
    """The contract of a checkpoint, without its weights."""
    return parse_config(_read_config(folder), f"{folder.name}/{CONFIG}")[1]


def load_draft(folder: Path, verifier: Verifier, dtype: torch.dtype) -> tuple[BlockDraft, Contract]:
    """Load a draft for a verifier, which must be the one it was trained for.

    Raises:
        InputError: another verifier, a damaged file, or a config that contradicts itself; one line says which.
    """
    config, contract = parse_config(_read_config(folder), f"{folder.name}/{CONFIG}")
    contract.require_verifier(verifier.identity, verifier.final_norm, verifier.logit_softcap)
    draft = BlockDraft(config)
    modules = {FILE_NAMES.get(name, name): name for name in draft.state_dict()}
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise InputError("checkpoint", folder / WEIGHTS, "no such file") from None
    except SafetensorError as error:
        raise InputError("checkpoint", folder / WEIGHTS, f"damaged ({error})") from None
    for name in sorted(modules.keys() ^ tensors.keys()):
        problem = "missing" if name in modules else "not part of such a draft"
        raise InputError(f"checkpoint tensor {name}", problem, f"{folder / WEIGHTS} does not fit its config.json")
    state = draft.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != state[modules[name]].shape:
            wanted = list(state[modules[name]].shape)
            raise InputError(f"checkpoint tensor {name}", list(tensor.shape), f"config.json makes it {wanted}")
    draft.load_state_dict({modules[name]: tensor for name, tensor in tensors.items()})
    draft.to(device=verifier.device, dtype=dtype).requires_grad_(False).eval()
    draft.borrow(verifier.embedding_VE, verifier.head_VE)
    return draft, contract


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError("checkpoint", folder, "no such folder")
    raw = read_json(folder / CONFIG, "checkpoint")
    if not isinstance(raw, dict):
        raise InputError("checkpoint", folder / CONFIG, "must hold a JSON object")
    return raw
