"""Saving and loading drafts: a folder with config.json, model.safetensors and provenance.json."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.checkpoints.speculators import DIGEST, FILE_NAMES, HEAD, config_json, parse_config
from blockdraft.contract import Contract
from blockdraft.draft_config import DraftConfig
from blockdraft.errors import InputError
from blockdraft.files import read_json, read_json_object, replacing, write_json, write_text, writing
from blockdraft.models.block_draft import BlockDraft
from blockdraft.models.fusion import ProjectedFusion
from blockdraft.models.vocabulary import DraftVocabulary, map_digest
from blockdraft.runtime import dtype_name
from blockdraft.typed import checked
from blockdraft.verifiers.base import TrainingVerifier

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
TRAINING_STATE, COMMAND, VALIDATION = "training_state.json", "train_command.txt", "val_metrics.json"
INFORMATIVE = (
    ("blockdraft", "verifier", "name"),
    ("blockdraft", "verifier", "revision"),
    ("speculators_config", "verifier", "name_or_path"),
)
"""Where the verifier lay. Names are for people; a folder that was moved is the same verifier."""


def save_draft(
    folder: Path,
    draft: BlockDraft,
    contract: Contract,
    dtype: torch.dtype,
    provenance: dict[str, Any],
    records: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        records: more text files of the run, by name.
    """
    with replacing(folder) as temporary:
        tensors = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in exported_tensors(draft).items()
        }
        with writing(folder, SafetensorError):  # its writer raises no OSError
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        stated = config_json(contract, dtype_name(dtype))
        write_json(temporary / CONFIG, {**stated, DIGEST: digest(stated, tensors)})
        write_json(temporary / PROVENANCE, provenance)
        for name, text in records.items():
            write_text(temporary / name, text)


def trained_chat(folder: Path) -> dict[str, Any]:
    """What the chat template was told when a checkpoint's data were made; empty where the checkpoint does not say."""
    path = folder / PROVENANCE
    if not path.is_file():
        return {}
    chat = {"thinking": str | None, "tools": list[dict[str, Any]] | None}
    stated = checked({"chat": dict[str, Any] | None}, read_json(path, "checkpoint"), f"checkpoint {PROVENANCE}")
    found: dict[str, Any] = checked(chat, stated.get("chat") or {}, f"checkpoint {PROVENANCE} chat")
    return {name: value for name, value in found.items() if value is not None}


def exported_tensors(draft: BlockDraft) -> dict[str, Tensor]:
    """Tensors under their names in the file.

    The standardization of a projected draft is folded into fc.weight; with a reduced vocabulary, its rows of the
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


def read_contract(folder: Path) -> Contract:
    """The contract of a checkpoint, without its weights."""
    return parse_config(_read_config(folder), f"{folder.name}/{CONFIG}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose parts have been checked against each other."""

    contract: Contract
    tensors: dict[str, Tensor]
    """By their names in the file."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and check config, contract and tensors against each other; no verifier is needed.

    Raises:
        InputError: a damaged or changed file, a tensor that is missing, unknown or of another shape, or a config that
            contradicts itself; one line says which.
    """
    raw = _read_config(folder)
    contract = parse_config(raw, f"{folder.name}/{CONFIG}")
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise InputError("checkpoint", path, "no such file") from None
    except SafetensorError as error:
        raise InputError("checkpoint", path, f"damaged ({error})") from None
    _require_tensors(contract.draft, tensors, path)
    _require_map(contract, tensors, path)
    found = digest(raw, tensors)
    if raw.get(DIGEST) != found:
        raise InputError(
            f"checkpoint {DIGEST}",
            raw.get(DIGEST, "missing"),
            f"{folder} holds {found}: weights or config.json were changed after they were written; export them again",
        )
    return Checkpoint(contract, tensors)


def digest(raw: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over config.json and every tensor, 16 digits; where the verifier lies is left out, since folders move."""
    facts = copy.deepcopy(raw)
    facts.pop(DIGEST, None)
    for keys in INFORMATIVE:
        place = facts
        for key in keys[:-1]:
            place = place.get(key) or {}
        place.pop(keys[-1], None)
    total = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def load_draft(folder: Path, verifier: TrainingVerifier, dtype: torch.dtype) -> tuple[BlockDraft, Contract]:
    """Load a draft for a verifier, which must be the one it was trained for.

    Raises:
        InputError: another verifier, or whatever `read_checkpoint` rejects.
    """
    found = read_checkpoint(folder)
    found.contract.require_verifier(verifier.identity, verifier.logit_softcap)
    draft = BlockDraft(found.contract.draft)
    draft.load_state_dict({name: found.tensors[FILE_NAMES.get(name, name)] for name in draft.state_dict()})
    draft.to(device=verifier.device, dtype=dtype).requires_grad_(False).eval()
    draft.share(verifier.embed, verifier.head_VE)
    if draft.config.reduced:  # the file's own rows of the head, as a server will use them
        draft.head_VE = found.tensors[HEAD].to(device=verifier.device, dtype=verifier.dtype)
    return draft, found.contract


def _require_tensors(config: DraftConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Reject tensors that are missing, unknown or of another shape than the config makes them."""
    with torch.device("meta"):
        shapes = {FILE_NAMES.get(name, name): list(t.shape) for name, t in BlockDraft(config).state_dict().items()}
    if config.reduced:
        shapes[HEAD] = [config.draft_vocab_size, config.hidden_size]
    for name in sorted(shapes.keys() ^ tensors.keys()):
        problem = "missing" if name in shapes else "not part of such a draft"
        raise InputError(f"checkpoint tensor {name}", problem, f"{path} does not fit its config.json")
    for name, tensor in tensors.items():
        if list(tensor.shape) != shapes[name]:
            raise InputError(
                f"checkpoint tensor {name}", list(tensor.shape), f"{path}: config.json makes it {shapes[name]}"
            )


def _require_map(contract: Contract, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Reject a vocabulary map whose two tensors differ, or that is not the one the draft was trained with."""
    config = contract.draft
    if not config.reduced:
        return
    vocabulary = DraftVocabulary(config)
    vocabulary.load_state_dict({"d2t": tensors["d2t"], "t2d": tensors["t2d"]})
    if not vocabulary.consistent:
        raise InputError("checkpoint tensors d2t and t2d", path, "state two different vocabulary maps")
    found = map_digest(vocabulary.ids, config.vocab_size)
    if found != contract.vocab_map_hash:
        raise InputError(
            "checkpoint vocabulary map", found, f"the contract says {contract.vocab_map_hash}; d2t is another draft's"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError("checkpoint", folder, "no such folder")
    return read_json_object(folder / CONFIG, "checkpoint")
