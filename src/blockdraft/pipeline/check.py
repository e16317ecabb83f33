"""`blockdraft check`: is a checkpoint whole, and does it belong to its verifier?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockdraft.checkpoints.store import read_checkpoint
from blockdraft.pipeline.loading import verifier_for
from blockdraft.settings import CheckSettings
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.identity import read_identity
from blockdraft.vllm_plugin.support import served_by_engine


def check(settings: CheckSettings) -> dict[str, Any]:
    """Check config, contract and weights against each other, and against the verifier where it is to be had.

    Raises:
        InputError: the first statement that is wrong, by name.
    """
    found = read_checkpoint(settings.checkpoint)
    contract = found.contract
    name, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    asked = settings.verifier_name_or_path is not None or settings.revision is not None
    compared = matrices = False
    if asked or (Path(name).is_dir() and not is_gguf(name)):
        identity, softcap = read_identity(name, settings.trust_remote_code, revision)
        contract.require_verifier(identity, softcap)
        compared, matrices = True, contract.verifier.matrices_comparable(identity)
    return {
        "checkpoint": str(settings.checkpoint),
        "method": contract.draft.method,
        "proposes up to": contract.draft.num_speculative_tokens,
        "taps": list(contract.draft.target_layer_ids),
        "draft vocabulary": contract.draft.draft_vocab_size,
        "tensors": len(found.tensors),
        "parameters": sum(t.numel() for t in found.tensors.values() if t.is_floating_point()),
        "verifier": name,
        "verifier compared": compared,
        "matrices compared": matrices,
        "served by vLLM": served_by_engine(contract, name),
        "verdict": "config, contract and weights agree" + (", and it is this verifier's" if compared else ""),
    }
