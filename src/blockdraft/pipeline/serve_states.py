"""`blockdraft serve VERIFIER --extract`: a vLLM server that gives trainers hidden states."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from blockdraft.errors import InputError
from blockdraft.files import require_writable, write_text
from blockdraft.progress import say
from blockdraft.runtime import dtype_name, limit_threads, resolve_device, resolve_dtype
from blockdraft.serving.processes import serve_until_stopped
from blockdraft.serving.states_files import served_files
from blockdraft.serving.states_launcher import StatesLaunch, launch_states
from blockdraft.settings import DEFAULT_NUM_TAPS, ServeSettings
from blockdraft.training.creation import spread_taps
from blockdraft.training.engine_states import FOLDER_ID
from blockdraft.verifiers.hub import is_gguf
from blockdraft.verifiers.identity import has_encoder, open_files

IN_MEMORY = Path("/dev/shm")  # where Linux keeps files in memory
VERIFIER = "VERIFIER with --extract"


def serve_states(settings: ServeSettings) -> dict[str, Any]:
    """Serve until stopped; states that nobody fetched are removed at the end."""
    plan = planned_states(settings)
    say(f"blockdraft: {plan.launch.summary}")
    if settings.dry_run:
        return {"command": plan.launch.command, "environment": plan.launch.environment, "url": plan.launch.url}
    plan.folder.mkdir(parents=True)
    try:
        write_text(plan.folder / FOLDER_ID, plan.folder_id)
        with served_files(plan.folder, settings.host, plan.port):
            serve_until_stopped(plan.launch)
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)
    return {}


def planned_states(settings: ServeSettings) -> StatesLaunch:
    """Everything that can be rejected is rejected here, before the engine loads anything."""
    limit_threads(settings.threads)
    name = str(settings.checkpoint)
    if is_gguf(name):
        raise InputError(VERIFIER, name, "vLLM takes a folder; unpack it first: blockdraft convert, then name that")
    files = open_files(name, settings.trust_remote_code, settings.revision)
    config = files.model.config.get_text_config()
    if has_encoder(files.model.config):
        raise InputError(VERIFIER, name, "vLLM gives no hidden states of encoder-decoder verifiers; train in process")
    depth = int(config.num_hidden_layers)
    usual = {tap for count in DEFAULT_NUM_TAPS.values() for tap in spread_taps(depth, count)}
    taps = sorted(set(settings.target_layer_ids) or usual)
    if taps[-1] > depth:
        raise InputError("--target-layer-ids", taps[-1], f"must be in 0..{depth} (0 is the embeddings)")
    where = settings.hidden_states_path or (IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir()))
    require_writable(where, "--hidden-states-path")
    folder_id = uuid.uuid4().hex
    origin = [
        *(("--revision", settings.revision) if settings.revision else ()),
        *(("--trust-remote-code",) * settings.trust_remote_code),
    ]
    return launch_states(
        str(Path(name).resolve()) if Path(name).is_dir() else name,
        type(files.model).__name__,
        taps,
        depth,
        folder=where.resolve() / f"blockdraft-states-{folder_id[:12]}",
        folder_id=folder_id,
        dtype=dtype_name(resolve_dtype(settings.dtype, resolve_device("auto"))),
        host=settings.host,
        port=settings.port,
        states_port=settings.states_port or settings.port + 1,
        threads=settings.threads,
        engine_arguments=(*origin, *settings.engine_arguments),
    )
