"""Saving and loading drafts: a folder with config.json, model.safetensors and provenance.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.checkpoints.speculators import FILE_NAMES, HEAD, config_json, parse_config
from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.folders import read_json, replacing, write_json
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.config import DraftConfig
from blockdraft.models.fusion import ProjectedFusion
from blockdraft.models.vocabulary import map_hash
from blockdraft.runtime import dtype_name
from blockdraft.verifiers.base import Verifier

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"


def save_draft(
    folder: Path, draft: BlockDraft, contract: Contract, dtype: torch.dtype, provenance: dict[str, Any]
) -> None:
    """Write a checkpoint, whole or not at all."""
    with replacing(folder) as temporary:
        tensors = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in exported_tensors(draft).items()
        }
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config_json(draft.config, contract, dtype_name(dtype)))
        write_json(temporary / PROVENANCE, provenance)


def exported_tensors(draft: BlockDraft) -> dict[str, Tensor]:
    """Tensors under their names in the file.

    The standardisation of a projected draft is folded into fc.weight; with a reduced vocabulary, its rows of the
    verifier's head travel along.
    """
    tensors = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    if isinstance(draft.fusion, ProjectedFusion) and draft.fusion.statistics is not None:
        tensors["fusion.fc.weight"] = draft.fusion.statistics.fold(tensors["fusion.fc.weight"])
        del tensors["fusion.statistics.direction"], tensors["fusion.statistics.scale"]
    named = {FILE_NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    if draft.vocabulary is not None:
        assert draft.head_VE is not None
        named[HEAD] = draft.head_VE
    return named


def read_checkpoint_facts(folder: Path) -> tuple[DraftConfig, Contract]:
    """Shape and contract of a checkpoint, without its weights."""
    return parse_config(_read_config(folder), f"{folder.name}/{CONFIG}")


def read_contract(folder: Path) -> Contract:
    """The contract of a checkpoint, without its weights."""
    return read_checkpoint_facts(folder)[1]


def load_draft(folder: Path, verifier: Verifier, dtype: torch.dtype) -> tuple[BlockDraft, Contract]:
    """Load a draft for a verifier, which must be the one it was trained for.

    Raises:
        InputError: another verifier, a damaged file, or a config that contradicts itself; one line says which.
    """
    config, contract = read_checkpoint_facts(folder)
    contract.require_verifier(verifier.identity, verifier.final_norm, verifier.logit_softcap)
    draft = BlockDraft(config)
    modules = {FILE_NAMES.get(name, name): name for name in draft.state_dict()}
    expected = modules.keys() | ({HEAD} if config.reduced else set())
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise InputError("checkpoint", folder / WEIGHTS, "no such file") from None
    except SafetensorError as error:
        raise InputError("checkpoint", folder / WEIGHTS, f"damaged ({error})") from None
    for name in sorted(expected ^ tensors.keys()):
        problem = "missing" if name in expected else "not part of such a draft"
        raise InputError(f"checkpoint tensor {name}", problem, f"{folder / WEIGHTS} does not fit its config.json")
    head = tensors.pop(HEAD) if config.reduced else None
    state = draft.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != state[modules[name]].shape:
            wanted = list(state[modules[name]].shape)
            raise InputError(f"checkpoint tensor {name}", list(tensor.shape), f"config.json makes it {wanted}")
    draft.load_state_dict({modules[name]: tensor for name, tensor in tensors.items()})
    draft.to(device=verifier.device, dtype=dtype).requires_grad_(False).eval()
    _require_map(draft, contract, folder)
    draft.borrow(verifier.embedding_VE, verifier.head_VE)
    if head is not None:
        _take_head(draft, head.to(device=verifier.device, dtype=verifier.dtype), folder)
    return draft, contract


def _require_map(draft: BlockDraft, contract: Contract, folder: Path) -> None:
    """Refuse a vocabulary map whose two tensors differ, or that is not the one the draft was trained with."""
    if draft.vocabulary is None:
        return
    if not draft.vocabulary.consistent:
        raise InputError("checkpoint tensors d2t and t2d", folder / WEIGHTS, "state two different vocabulary maps")
    found = map_hash(draft.vocabulary.ids, draft.config.vocab_size)
    if found != contract.vocab_map_hash:
        raise InputError(
            "checkpoint vocabulary map", found, f"the contract says {contract.vocab_map_hash}; d2t is another draft's"
        )


def _take_head(draft: BlockDraft, head: Tensor, folder: Path) -> None:
    """Use the file's output head, as a server will; it must have the rows of the map."""
    assert draft.head_VE is not None
    if head.shape != draft.head_VE.shape:
        raise InputError(f"checkpoint tensor {HEAD}", list(head.shape), f"{folder / WEIGHTS}: must have a row a token")
    object.__setattr__(draft, "head_VE", head)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError("checkpoint", folder, "no such folder")
    raw = read_json(folder / CONFIG, "checkpoint")
    if not isinstance(raw, dict):
        raise InputError("checkpoint", folder / CONFIG, "must hold a JSON object")
    return raw
