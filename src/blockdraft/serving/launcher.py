"""From a checkpoint to a running `vllm serve`: arguments, environment, one line that says what is served."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.contract import Contract
from blockdraft.errors import InputError
from blockdraft.presets import vllm_method_of
from blockdraft.serving.cpu_wheel import NAME, WHEEL, installed
from blockdraft.serving.load import Steps, engine_ranges
from blockdraft.vllm_plugin.record import RECORD_PATH
from blockdraft.vllm_plugin.servable import engine_method, is_known, require_servable, unknown_engine
from blockdraft.vllm_plugin.support import T5GEMMA2, require_hidden_states

OURS = ("--speculative-config", "-sc", "--model", "--tokenizer", "--dtype", "--host", "--port")
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "blockdraft"
CPU_CACHE_GIB = 1  # key/value cache on CPUs where nobody says otherwise; vLLM would take half of the memory

INTEL_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"


@dataclass(frozen=True, slots=True)
class Launch:
    """A server that is ready to be started.

    Attributes:
        command: argument vector.
        environment: variables to add to the caller's own.
        summary: which verifier, method, K, windows and port, in a line.
    """

    command: list[str]
    environment: dict[str, str]
    summary: str
    url: str


def require_engine() -> str:
    """The engine's version; rejects a missing, unknown or half-installed vLLM."""
    wheel = installed(WHEEL)
    version = installed(NAME)
    if version is None and wheel is None:
        raise InputError(
            "vllm", "not installed", "run `pip install 'blockdraft[serve]'` (CUDA) or `make serve-cpu` (CPU)"
        )
    if version is None:
        raise InputError(
            WHEEL, f"{wheel} without the metadata of vllm", "run `python -m blockdraft.serving.cpu_wheel` once"
        )
    if not is_known(version):
        raise unknown_engine(version)
    return version


def on_cpu() -> bool:
    """Whether the installed engine is the one for CPUs."""
    return "cpu" in require_engine()


def speculative_config(
    folder: Path, contract: Contract, k: int, v1_runner: bool, by_load: Steps | None = None
) -> dict[str, object]:
    """What `--speculative-config` gets.

    Args:
        by_load: K by the number of requests at once; `k` is the largest.
    """
    config: dict[str, object] = {
        "model": str(folder),
        "method": engine_method(contract, v1_runner),
        "num_speculative_tokens": k,
    }
    return config | ({"num_speculative_tokens_per_batch_size": engine_ranges(by_load)} if by_load else {})


def engine_environment(threads: int, cpu: bool, v1_runner: bool) -> dict[str, str]:
    """Variables for the engine: quiet threads on CPUs, the runner that the draft needs, no usage report."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if cpu:
        # Bound to cores, two engines (or an engine and its client) would be bound to the same ones.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["OMP_NUM_THREADS"] = str(threads or os.cpu_count() or 1)
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_CACHE_GIB)
        if INTEL_OPENMP.is_file():  # comes with the wheel; vLLM wants it loaded first where it speculates
            variables["LD_PRELOAD"] = str(INTEL_OPENMP)
    elif v1_runner:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def needs_v1_runner(contract: Contract, cpu: bool) -> bool:
    """Whether the engine must use (CPUs: uses) its V1 runner for this draft."""
    draft = contract.draft
    known = vllm_method_of(draft.method) is not None and draft.sequential_head in ("none", "markov")
    return cpu or not known or contract.verifier.architecture == T5GEMMA2


def launch(
    folder: Path,
    contract: Contract,
    verifier: str,
    *,
    k: int,
    by_load: Steps | None = None,
    dtype: str,
    host: str,
    port: int,
    threads: int = 0,
    record: Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    engine_arguments: Sequence[str] = (),
) -> Launch:
    """Plan `vllm serve` for a checkpoint; rejects what cannot work before anything is started.

    Args:
        template_options: what requests tell the chat template unless they say otherwise, such as not to think.
    """
    cpu = on_cpu()
    v1_runner = needs_v1_runner(contract, cpu)
    require_plugin()
    require_servable(contract, v1_runner)
    require_hidden_states(verifier, contract.verifier.architecture, contract.draft.target_layer_ids)
    for argument in engine_arguments:
        if argument.split("=")[0] in OURS:
            raise InputError(argument, "engine flag", "blockdraft serve sets it itself; use its own flags")
    require_free(host, port)
    speculative = speculative_config(folder, contract, k, v1_runner, by_load)
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *vllm_arguments(contract, verifier, speculative, dtype, host, port, template_options),
        *engine_arguments,
    ]
    environment = engine_environment(threads, cpu, v1_runner)
    if record is not None:
        environment[RECORD_PATH] = str(record.resolve())
    url = f"http://{host}:{port}"
    kinds = sorted({"full" if window is None else f"sliding {window}" for window in contract.draft.windows})
    summary = (
        f"serving {verifier} in {dtype} with a {contract.draft.method} draft "
        f"(engine method {speculative['method']}), K={k}"
        + "".join(f", {smaller} above {most} requests at once" for most, smaller in _changes(by_load))
        + ", "
        f"context {' and '.join(kinds)}, "
        + "".join(f"{name.replace('_', ' ')} {value}, " for name, value in (template_options or {}).items())
        + f"at {url}"
    )
    return Launch(command, environment, summary, url)


def vllm_arguments(
    contract: Contract,
    verifier: str,
    speculative: Mapping[str, object],
    dtype: str,
    host: str,
    port: int,
    template_options: Mapping[str, Any] | None,
) -> list[str]:
    """What `vllm` is called with to serve a draft; `launch` says what the arguments are."""
    return [
        *("serve", verifier, "--dtype", dtype, "--host", host, "--port", str(port)),
        *("--speculative-config", json.dumps(speculative)),
        *("--per-request-spec-decode-metrics", "detailed"),
        *(("--enforce-eager",) if contract.verifier.architecture == T5GEMMA2 else ()),
        *(("--default-chat-template-kwargs", json.dumps(template_options)) if template_options else ()),
    ]


def _changes(by_load: Steps | None) -> Steps:
    """Numbers of requests above which K becomes another one."""
    steps = by_load or []
    return [(before[0], after[1]) for before, after in itertools.pairwise(steps)]


def without_draft(plan: Launch, port: int) -> Launch:
    """The same server without its draft, on another port."""
    command = list(plan.command)
    for flag in ("--speculative-config", "--per-request-spec-decode-metrics"):
        at = command.index(flag)
        del command[at : at + 2]
    command[command.index("--port") + 1] = str(port)
    host = command[command.index("--host") + 1]
    return dataclasses.replace(plan, command=command, summary="", url=f"http://{host}:{port}")


def require_free(host: str, port: int) -> None:
    """Reject a port that something listens on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError("--port", port, f"cannot be bound on {host} ({error.strerror}); choose another") from None


def require_plugin() -> None:
    """Reject an environment in which the engine would not load the plugin."""
    found = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    if PLUGIN not in {point.name for point in found}:
        raise InputError(
            PLUGIN_GROUP, f"no entry point {PLUGIN!r}", "install blockdraft beside vLLM (pip install), not by a path"
        )
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is not None and PLUGIN not in wanted.split(","):
        raise InputError("VLLM_PLUGINS", wanted, f"leaves out the plugin; add {PLUGIN} or unset it")
