"""Verifier and draft from settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blockdraft.checkpoints.store import load_draft, read_contract, trained_chat
from blockdraft.contract import Contract, VerifierIdentity
from blockdraft.data.conversations import Messages
from blockdraft.data.prompts import encode_prompt, read_prompts
from blockdraft.data.templates import ChatMode
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import Reply
from blockdraft.errors import InputError
from blockdraft.models.block_draft import BlockDraft
from blockdraft.progress import LOGGER
from blockdraft.runtime import has_fast_bfloat16, limit_threads, resolve_device, resolve_dtype
from blockdraft.settings import CheckpointSettings, TrainSettings, VerifierSettings
from blockdraft.verifiers.base import TrainingVerifier, Verifier
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.loading import load_verifier
from blockdraft.verifiers.parts import SHAPE_FLAGS, read_parts


def verifier_of(settings: VerifierSettings) -> Verifier:
    """The verifier that the settings name."""
    limit_threads(settings.threads)
    device = resolve_device(settings.device)
    return load_verifier(
        settings.verifier_name_or_path,
        resolve_dtype(settings.dtype, device),
        device,
        settings.trust_remote_code,
        settings.revision,
    )


def training_verifier_of(settings: TrainSettings, states_come_ready: bool) -> TrainingVerifier:
    """What training needs of the verifier that the settings name.

    Args:
        states_come_ready: hidden states are not made in this process: its parts are enough, and it may be of a family
            that cannot be driven here. A GGUF file is read whole either way.
    """
    if not states_come_ready or is_gguf(settings.verifier_name_or_path):
        return verifier_of(settings)
    limit_threads(settings.threads)
    device = resolve_device(settings.device)
    return read_parts(
        settings.verifier_name_or_path,
        resolve_dtype(settings.dtype, device),
        device,
        settings.trust_remote_code,
        settings.revision,
        {name: getattr(settings, name) for name in SHAPE_FLAGS},
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft with the verifier it was trained for.

    Attributes:
        trust_remote_code: whether the verifier's own code may be run, should it be loaded again.
    """

    verifier: Verifier
    draft: BlockDraft
    contract: Contract
    mode: ChatMode = ChatMode()
    trust_remote_code: bool = False

    def encode(self, prompts: Sequence[str | Messages]) -> list[list[int]]:
        """Prompts as token ids by the verifier's chat template: questions of a user, or conversations."""
        asked = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
        return encode_all(self.verifier, asked, self.mode)

    def text(self, reply: Reply) -> str:
        """The text of a reply."""
        return str(self.verifier.tokenizer.decode(reply.tokens, skip_special_tokens=True))

    def exact_verifier(self) -> Verifier:
        """The verifier in float32, loaded anew if it computes in something else."""
        if self.verifier.dtype == torch.float32:
            return self.verifier
        name, revision = recorded_verifier(self.verifier.identity)
        return load_verifier(name, torch.float32, str(self.verifier.device), self.trust_remote_code, revision)


def recorded_verifier(identity: VerifierIdentity) -> tuple[str, str | None]:
    """Name and revision under which a verifier is found again; a folder has no revision."""
    return identity.name, None if Path(identity.name).exists() else identity.revision


def verifier_for(contract: Contract, name: str | None, revision: str | None) -> tuple[str, str | None]:
    """Name and revision of the verifier of a checkpoint: what was given, else what the checkpoint recorded."""
    if name is not None:
        return name, revision
    recorded, its_revision = recorded_verifier(contract.verifier)
    return recorded, revision or its_revision


def chat_mode_of(checkpoint: Path, thinking: str) -> ChatMode:
    """What the chat template is told; "trained" is what it was told for the draft's data."""
    stated = trained_chat(checkpoint)
    trained = ChatMode(stated.get("thinking", "auto"), tuple(stated.get("tools", ())))
    return trained if thinking == "trained" else ChatMode(thinking, trained.tools)


def trained_dtype(name: str, contract: Contract, device: str) -> torch.dtype:
    """A dtype by its name; "auto" is what the draft was trained in, where the device has it."""
    if name != "auto":
        return resolve_dtype(name, device)
    return torch.bfloat16 if contract.compute_dtype == "bfloat16" and has_fast_bfloat16(device) else torch.float32


def load_pair(settings: CheckpointSettings, verifier: Verifier | None = None) -> Pair:
    """Load a checkpoint and its verifier; "auto" is the dtype the draft was trained in, where the device has it.

    Args:
        verifier: one that is loaded already; the draft takes its dtype and device.
    """
    limit_threads(settings.threads)
    if verifier is None:
        device = resolve_device(settings.device)
        contract = read_contract(settings.checkpoint)
        name, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
        dtype = trained_dtype(settings.dtype, contract, device)
        verifier = load_verifier(name, dtype, device, settings.trust_remote_code, revision)
    draft, contract = load_draft(settings.checkpoint, verifier, verifier.dtype)
    where = (verifier.dtype, verifier.device)
    LOGGER.debug("draft %s (%s) loaded in %s on %s", settings.checkpoint, contract.draft.method, *where)
    mode = chat_mode_of(settings.checkpoint, settings.thinking)
    return Pair(verifier, draft, contract, mode, settings.trust_remote_code)


def require_confidence(pair: Pair, threshold: float) -> None:
    """Reject a confidence threshold for a draft that estimates none."""
    if threshold and pair.draft.confidence is None:
        raise InputError("--confidence-threshold", threshold, "this draft has no confidence head; leave it out")


def encode_all(verifier: Verifier, conversations: list[Messages], mode: ChatMode | None = None) -> list[list[int]]:
    """Prompts as token ids, each of which the verifier can read."""
    prompts = [encode_prompt(verifier.tokenizer, conversation, mode) for conversation in conversations]
    for number, prompt in enumerate(prompts, start=1):
        verifier.sides(prompt, f"prompt {number}")
    return prompts


def heldout_or_file(data_path: Path | None, workload: str, max_prompts: int) -> list[Messages]:
    """Prompts of a file, or the held-out ones of a workload."""
    conversations = read_prompts(data_path, "--data-path") if data_path else workload_prompts(workload)[1]
    return conversations[:max_prompts] if max_prompts else conversations
