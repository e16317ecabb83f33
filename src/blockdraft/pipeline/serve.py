"""`blockdraft serve`: check the pair, then run `vllm serve`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockdraft.checkpoints.store import read_checkpoint, read_contract
from blockdraft.contract import Contract
from blockdraft.data.prompts import encode_prompt
from blockdraft.errors import InputError
from blockdraft.pipeline.loading import chat_mode_of, heldout_or_file, trained_dtype, verifier_for
from blockdraft.pipeline.serve_states import serve_states
from blockdraft.progress import say
from blockdraft.runtime import dtype_name, resolve_device
from blockdraft.serving.launcher import Launch, launch, without_draft
from blockdraft.serving.load import measure, read_steps, report
from blockdraft.serving.processes import running, serve_until_stopped
from blockdraft.settings import ServeSettings
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.identity import read_identity
from blockdraft.verifiers.text_side import read_text_side

SELF_TEST_PROMPTS = 16


def serve(settings: ServeSettings) -> dict[str, Any]:
    """Serve until stopped (SIGTERM, Ctrl-C)."""
    if settings.extract:
        return serve_states(settings)
    plan = planned(settings)
    say(f"blockdraft: {plan.summary}")
    if settings.dry_run:
        return {"command": plan.command, "environment": plan.environment, "url": plan.url}
    if not settings.self_test and not settings.k_by_load:
        say("blockdraft: many requests at once may be slower with a draft than without; --self-test measures it")
    serve_until_stopped(plan, _self_test(settings, plan) if settings.self_test else None)
    return {}


def _self_test(settings: ServeSettings, plan: Launch) -> Callable[[], None]:
    """Measure the verifier alone, in an engine of its own that has ended when this returns.

    Returns:
        What measures the server with the draft and says how the two compare.
    """
    prompts = self_test_prompts(settings)
    with tempfile.TemporaryDirectory() as folder:
        say("blockdraft: self-test, the verifier alone")
        with running(without_draft(plan, settings.port), Path(folder) / "log.txt"):
            plain = measure(plan.url, prompts)
    k = read_contract(settings.checkpoint).draft.num_speculative_tokens if settings.k is None else settings.k

    def compare() -> None:
        say("blockdraft: self-test, with the draft")
        for line in report(plain, measure(plan.url, prompts), k):
            say(f"blockdraft: {line}")

    return compare


def self_test_prompts(settings: ServeSettings) -> list[list[int]]:
    """A few prompts as the verifier's chat template writes them."""
    contract = read_contract(settings.checkpoint)
    name, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    tokenizer = read_text_side(name, settings.trust_remote_code, revision).tokenizer
    mode = chat_mode_of(settings.checkpoint, settings.thinking)
    conversations = heldout_or_file(settings.data_path, "records", SELF_TEST_PROMPTS)
    return [encode_prompt(tokenizer, conversation, mode) for conversation in conversations]


def planned(settings: ServeSettings) -> Launch:
    """Everything that can be rejected is rejected here, before the engine loads anything."""
    found = read_checkpoint(settings.checkpoint)
    contract = found.contract
    verifier = servable_verifier(contract, settings.verifier_name_or_path)
    by_load = read_steps(settings.k_by_load, contract)
    if by_load and settings.k is not None:
        raise InputError("--k", settings.k, "--k-by-load says it already; leave one out")
    k = contract.draft.num_speculative_tokens if settings.k is None else settings.k
    if by_load:
        k = max(k for _, k in by_load)
    contract.require_k(k)
    if settings.data_path is not None and not settings.self_test:
        raise InputError("--data-path", settings.data_path, "belongs to --self-test")
    if settings.self_test and by_load:
        raise InputError("--self-test", "with --k-by-load", "it finds out what to give there; leave one out")
    _, revision = verifier_for(contract, settings.verifier_name_or_path, settings.revision)
    contract.require_verifier(*read_identity(verifier, settings.trust_remote_code, revision))
    origin = [*(("--revision", revision) if revision else ()), *(("--trust-remote-code",) * settings.trust_remote_code)]
    return launch(
        settings.checkpoint.resolve(),
        contract,
        verifier,
        k=k,
        by_load=by_load,
        dtype=dtype_name(trained_dtype(settings.dtype, contract, resolve_device("auto"))),
        host=settings.host,
        port=settings.port,
        threads=settings.threads,
        record=settings.record,
        template_options=chat_mode_of(settings.checkpoint, settings.thinking).options(),
        engine_arguments=(*origin, *settings.engine_arguments),
    )


def servable_verifier(contract: Contract, given: str | None) -> str:
    """The verifier's folder or hub id; a GGUF file is rejected, since drafts are served on unpacked weights."""
    name = given or contract.verifier.name
    if is_gguf(name):
        raise InputError(
            "--verifier-name-or-path", name, "vLLM takes a folder; unpack it first: blockdraft convert, then name that"
        )
    return str(Path(name).resolve()) if Path(name).is_dir() else name
