"""`blockdraft serve`: check the pair, then run `vllm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockdraft.checkpoints.store import read_checkpoint
from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.pipeline.loading import chat_mode_of, trained_dtype, verifier_for
from blockdraft.progress import say
from blockdraft.runtime import dtype_name, resolve_device
from blockdraft.serving.launcher import Launch, launch
from blockdraft.serving.processes import serve_until_stopped
from blockdraft.settings import ServeSettings
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.identity import read_identity


def serve(settings: ServeSettings) -> dict[str, Any]:
    """Serve until stopped (SIGTERM, Ctrl-C)."""
    plan = planned(settings)
    say(f"blockdraft: {plan.summary}")
    if settings.dry_run:
        return {"command": plan.command, "environment": plan.environment, "url": plan.url}
    serve_until_stopped(plan)
    return {}


def planned(settings: ServeSettings) -> Launch:
    """Everything that can be refused is refused here, before the engine loads anything."""
    found = read_checkpoint(settings.checkpoint)
    contract = found.contract
    verifier = servable_verifier(contract, settings.verifier_name_or_path)
    k = contract.default_k if settings.k is None else settings.k
    contract.require_k(k)
    _, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    contract.require_verifier(*read_identity(verifier, settings.trust_remote_code, revision))
    origin = [*(("--revision", revision) if revision else ()), *(("--trust-remote-code",) * settings.trust_remote_code)]
    return launch(
        settings.checkpoint.resolve(),
        found.config,
        contract,
        verifier,
        k=k,
        dtype=dtype_name(trained_dtype(settings.dtype, contract, resolve_device("auto"))),
        host=settings.host,
        port=settings.port,
        threads=settings.threads,
        record=settings.record,
        template_options=chat_mode_of(settings.checkpoint, settings.thinking).options(),
        engine_arguments=(*origin, *settings.engine_arguments),
    )


def servable_verifier(contract: Contract, given: str | None) -> str:
    """The verifier's folder or hub id; a GGUF file is refused, since drafts are served on unpacked weights."""
    name = given or contract.verifier.name
    if is_gguf(name):
        raise InputError(
            "--verifier-name-or-path", name, "vLLM takes a folder; unpack it first: blockdraft convert, then name that"
        )
    return str(Path(name).resolve()) if Path(name).is_dir() else name
