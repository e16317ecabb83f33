"""`blockdraft check`: does a checkpoint contradict itself, and does it belong to its verifier?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from blockdraft.checkpoints.examine.facts import CheckpointFacts, read_facts
from blockdraft.checkpoints.examine.finding import Finding, error, not_checked
from blockdraft.checkpoints.examine.table import CHECKS, VERIFIER, examine
from blockdraft.checkpoints.store import read_contract
from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.pipeline.loading import verifier_for
from blockdraft.settings import CheckSettings
from blockdraft.verifiers.hub import is_gguf, require_hub_id, unreadable
from blockdraft.verifiers.identity import read_identity
from blockdraft.vllm_plugin.support import served_by_engine


def check(settings: CheckSettings) -> dict[str, Any]:
    """Look for contradictions among the files of a checkpoint, and between it and its verifier.

    Returns:
        What the checkpoint is, every finding, and `failures`: the errors among them.

    Raises:
        InputError: there is no checkpoint, or no verifier where one was named.
    """
    return check_facts(read_facts(settings.checkpoint), settings)


def check_facts(facts: CheckpointFacts, settings: CheckSettings) -> dict[str, Any]:
    """The same for facts that were read."""
    asked = settings.verifier_name_or_path is not None or settings.revision is not None
    name = settings.verifier_name_or_path or facts.recorded_verifier
    there = name is not None and (asked or Path(name).is_dir()) and not is_gguf(name)
    if asked and name is not None:
        require_hub_id(name, settings.revision)
    if there and name is not None:
        facts = with_verifier(facts, name, settings.revision)
    findings = examine(facts)
    contract = None if any(each.check == "contract" for each in findings) else _contract(facts)
    compared, found = _compare_verifier(facts, contract, settings) if there else (None, [])
    if not there:
        found = [
            not_checked(
                "identity and weights", name or "not recorded", "no folder here; name it: --verifier-name-or-path"
            )
        ]
    findings += [dataclasses.replace(each, check=VERIFIER) for each in found]
    failures = [each.text for each in findings if each.level == "error"]
    return {
        "checkpoint": str(settings.checkpoint),
        "layout": facts.layout,
        **_described(facts, contract, name),
        "verifier compared": compared is not None,
        "matrices compared": compared is True,
        "checks": len(CHECKS) + 1,
        "findings": [each.to_dict() for each in findings],
        "failures": failures,
        "verdict": _verdict(len(failures), compared is not None),
    }


def with_verifier(facts: CheckpointFacts, name: str, revision: str | None = None) -> CheckpointFacts:
    """Facts with those of the verifier's config; its weights are not needed.

    Raises:
        InputError: there is no such config.
    """
    try:
        config, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except Exception as problem:  # whatever the hub's client raises
        raise unreadable(name, problem) from problem
    text = next((config[key] for key in ("text_config", "decoder") if isinstance(config.get(key), dict)), config)
    stops = _ids(text.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    with contextlib.suppress(OSError):  # it is optional: a folder without one has the config's stops alone
        stops |= _ids(GenerationConfig.from_pretrained(name, revision=revision or "main").eos_token_id)
    return dataclasses.replace(facts, verifier=text, verifier_name=name, verifier_stops=stops)


def _ids(value: Any) -> frozenset[int]:
    return frozenset(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))


def _contract(facts: CheckpointFacts) -> Contract | None:
    return read_contract(facts.folder) if facts.own else None


def _compare_verifier(
    facts: CheckpointFacts, contract: Contract | None, settings: CheckSettings
) -> tuple[bool | None, list[Finding]]:
    """Whether the matrices were compared; None where nothing was. And what differs."""
    if contract is None:
        why = "the checkpoint has no contract" if not facts.own else "its contract contradicts itself"
        return None, [not_checked("identity and weights", why, "only its config was compared")]
    name, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    identity, softcap = read_identity(name, settings.trust_remote_code, revision)
    try:
        contract.require_verifier(identity, softcap)
    except InputError as problem:
        return None, [error(problem.field, problem.value, problem.hint)]
    return contract.verifier.matrices_comparable(identity), []


def _described(facts: CheckpointFacts, contract: Contract | None, verifier: str | None) -> dict[str, Any]:
    floats = [each.shape for each in facts.tensors.values() if each.dtype.startswith(("F", "BF"))]
    return {
        "method": contract.draft.method if contract else facts.method,
        "proposes up to": contract.draft.num_speculative_tokens if contract else facts.proposed,
        "taps": facts.target_layer_ids,
        "draft vocabulary": facts.draft_vocab_size,
        "tensors": len(facts.tensors),
        "parameters": sum(math.prod(shape) for shape in floats),
        "verifier": verifier,
        **({"served by vLLM": served_by_engine(contract, verifier)} if contract and verifier else {}),
    }


def _verdict(failures: int, compared: bool) -> str:
    if failures:
        return f"{failures} contradiction{'s' if failures > 1 else ''}"
    return "config, contract and weights agree" + (", and it is this verifier's" if compared else "")
