"""What a checkpoint folder states, each file read once; weights are described, not loaded.

Layouts: our own and Speculators' (nested), z-lab's, AngelSlim's and SpecForge's (`dflash_config`), and DeepSpec's (all
keys on top). Target layers are given in our numbering: i is the residual stream after i decoder layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.checkpoints.examine.command import Command, commands_of_card, parse_command
from blockdraft.checkpoints.older import upgraded
from blockdraft.checkpoints.speculators import CONTRACT_KEY
from blockdraft.checkpoints.store import COMMAND, CONFIG, PROVENANCE, TRAINING_STATE, WEIGHTS
from blockdraft.errors import InputError
from blockdraft.files import read_json_object, read_text, reason

INDEX = "model.safetensors.index.json"
CARD = "README.md"
NESTED_ZLAB = "dflash_config"
_LARGEST_HEADER = 100_000_000  # the limit of safetensors' own reader


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """Everything that the checks compare.

    Attributes:
        layout: "blockdraft", "speculators", "z-lab", "angelslim", "deepspec" or "unknown".
        layers: the config of the decoder layers; the whole config where it is flat.
        nested: `dflash_config`, or nothing.
        contract, draft: the contract and the draft's config in it, or nothing.
        damage: files that could not be read, with the reason.
        verifier: config of the verifier's text decoder, or nothing.
        verifier_stops: tokens that end its replies.
    """

    folder: Path
    config: dict[str, Any]
    layout: str
    layers: dict[str, Any]
    nested: dict[str, Any]
    contract: dict[str, Any]
    draft: dict[str, Any]
    tensors: dict[str, StoredTensor]
    indexed: dict[str, str]
    damage: dict[str, str]
    commands: tuple[Command, ...]
    provenance: dict[str, Any]
    state: dict[str, Any]
    card: str | None
    verifier: dict[str, Any] = field(default_factory=dict)
    verifier_name: str = ""
    verifier_stops: frozenset[int] = frozenset()

    @property
    def own(self) -> bool:
        """Whether the checkpoint has a contract."""
        return self.layout == "blockdraft"

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings of the run that made it, where they were recorded."""
        return _mapping(self.provenance.get("settings"))

    @property
    def method(self) -> str | None:
        """dflash, dflare, dspark, ..., as the config names it."""
        named = self.config.get("speculators_model_type")
        if isinstance(named, str):
            return named
        known = re.search(r"dflare|dspark|dflash", " ".join(map(str, self.architectures)).lower())
        return known[0] if known else None

    @property
    def architectures(self) -> list[str]:
        """The classes that the config names."""
        found = self.config.get("architectures")
        return [str(each) for each in found] if isinstance(found, list) else []

    def stated(self, name: str) -> Any:
        """A fact of the draft from the top of the config, from `dflash_config` or from the layers."""
        for place in (self.config, self.nested, self.layers):
            if place.get(name) is not None:
                return place[name]
        return None

    @property
    def target_layer_ids(self) -> list[int] | None:
        """Target layers in our numbering; None where they are not stated as whole numbers."""
        found = self.config.get("aux_hidden_state_layer_ids")
        shift = 0
        if found is None:
            found, shift = self.stated("target_layer_ids"), 1
        if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
            return None
        return [each + shift for each in found]

    @property
    def number_of_layers(self) -> int | None:
        """Draft layers."""
        found = self.layers.get("num_hidden_layers")
        return found if isinstance(found, int) else None

    @property
    def vocab_size(self) -> int | None:
        """Rows of the verifier's head, as the draft's config states them."""
        found = self.layers.get("vocab_size")
        return found if isinstance(found, int) else None

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens that the draft can propose; the full vocabulary where the layout knows no other."""
        found = self.stated("draft_vocab_size")
        return found if isinstance(found, int) else self.vocab_size

    @property
    def proposed(self) -> int | None:
        """Tokens of a round, as the Speculators format states them."""
        methods = _mapping(self.config.get("speculators_config")).get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else None
        found = _mapping(first).get("speculative_tokens")
        return found if isinstance(found, int) else None

    @property
    def recorded_verifier(self) -> str | None:
        """Name of the verifier in the config."""
        own = _mapping(self.contract.get("verifier")).get("name")
        found = own or _mapping(_mapping(self.config.get("speculators_config")).get("verifier")).get("name_or_path")
        return found if isinstance(found, str) else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a stored tensor."""
        found = self.tensors.get(name)
        return None if found is None else found.shape


def without_card(facts: CheckpointFacts) -> CheckpointFacts:
    """The facts without what a model card states, for a check before the card is written anew."""
    commands = tuple(each for each in facts.commands if each.where != CARD)
    return dataclasses.replace(facts, card=None, commands=commands)


def read_facts(folder: Path) -> CheckpointFacts:
    """Read the facts of a folder.

    Raises:
        InputError: no such folder, or no config.json that can be read.
    """
    if not folder.is_dir():
        raise InputError("checkpoint", folder, "no such folder")
    config = read_json_object(folder / CONFIG, "checkpoint")
    damage: dict[str, str] = {}
    tensors, indexed = _read_tensors(folder, damage)
    nested = _mapping(config.get(NESTED_ZLAB))
    layers = _mapping(config.get("transformer_layer_config")) or config
    contract = _contract(config)
    provenance = _read_object(folder / PROVENANCE, damage)
    card = _read_optional_text(folder / CARD, damage)
    return CheckpointFacts(
        folder=folder,
        config=config,
        layout=_layout(config),
        layers=layers,
        nested=nested,
        contract=contract,
        draft=_mapping(contract.get("draft")),
        tensors=tensors,
        indexed=indexed,
        damage=damage,
        commands=tuple(_commands(folder, provenance, card, damage)),
        provenance=provenance,
        state=_read_object(folder / TRAINING_STATE, damage),
        card=card,
    )


def _layout(config: dict[str, Any]) -> str:
    if CONTRACT_KEY in config:
        return "blockdraft"
    if "speculators_model_type" in config or "speculators_config" in config:
        return "speculators"
    if NESTED_ZLAB in config:
        return "angelslim" if "num_anchors" in config or "QwenDFl" in str(config.get("architectures")) else "z-lab"
    if "target_layer_ids" in config or "dspark_target_layer_ids" in config:
        return "deepspec"
    return "unknown"


def _contract(config: dict[str, Any]) -> dict[str, Any]:
    """The contract in its present version; as it stands where it cannot be read, which a check of its own says."""
    with contextlib.suppress(InputError):
        return _mapping(upgraded(config, CONTRACT_KEY, CONFIG).get(CONTRACT_KEY)) if CONTRACT_KEY in config else {}
    return _mapping(config.get(CONTRACT_KEY))


def _commands(folder: Path, provenance: dict[str, Any], card: str | None, damage: dict[str, str]) -> list[Command]:
    texts = [(_read_optional_text(folder / COMMAND, damage), COMMAND), (provenance.get("command"), PROVENANCE)]
    found = [parse_command(text, where) for text, where in texts if isinstance(text, str)]
    return [*(each for each in found if each is not None), *commands_of_card(card or "", CARD)]


def _read_tensors(folder: Path, damage: dict[str, str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    indexed: dict[str, str] = {}
    if (folder / INDEX).is_file():
        found = _mapping(_read_object(folder / INDEX, damage).get("weight_map"))
        indexed = {name: str(file) for name, file in found.items()}
    files = sorted(set(indexed.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: dict[str, StoredTensor] = {}
    for name in files or [WEIGHTS]:
        try:
            tensors.update(_read_header(folder / name))
        except FileNotFoundError:
            damage[name] = "missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            damage[name] = f"damaged ({reason(error)})"
    return tensors, indexed


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, dtypes and shapes in a safetensors file; its data must be there in full length."""
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > _LARGEST_HEADER:
            raise ValueError("its header is too long")
        header = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"it has {path.stat().st_size:,} bytes, its header says {8 + length + end:,}")
    return {
        name: StoredTensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), path.name)
        for name, entry in header.items()
    }


def _read_object(path: Path, damage: dict[str, str]) -> dict[str, Any]:
    """A JSON object; nothing where there is no file."""
    if path.is_file():
        try:
            return read_json_object(path, path.name)
        except InputError as error:
            damage[path.name] = error.hint
    return {}


def _read_optional_text(path: Path, damage: dict[str, str]) -> str | None:
    if path.is_file():
        try:
            return read_text(path, path.name)
        except InputError as error:
            damage[path.name] = error.hint
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
