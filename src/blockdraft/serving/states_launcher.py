"""`vllm serve` as a source of hidden states: its arguments for `extract_hidden_states` and our connector."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import InputError
from blockdraft.serving.launcher import OURS, Launch, engine_environment, on_cpu, require_free, require_plugin
from blockdraft.vllm_plugin.support import require_hidden_states

_CONNECTOR, _MODULE = "BlockdraftStatesConnector", "blockdraft.vllm_plugin.states_connector"
_PREFIX_CACHING = ("--enable-prefix-caching", "--kv-transfer-config")


@dataclass(frozen=True, slots=True)
class StatesLaunch:
    """A server of hidden states that is ready to be started.

    Attributes:
        folder: where the engine writes states; it must be made, with a file that holds `folder_id`.
        port: where the files of that folder are to be served.
    """

    launch: Launch
    folder: Path
    folder_id: str
    port: int


def launch_states(
    verifier: str,
    architecture: str,
    taps: Sequence[int],
    num_layers: int,
    *,
    folder: Path,
    folder_id: str,
    dtype: str,
    host: str,
    port: int,
    states_port: int,
    threads: int = 0,
    engine_arguments: Sequence[str] = (),
) -> StatesLaunch:
    """Plan `vllm serve` for the states after some numbers of layers, and after all of them.

    Prefix caching is switched off: vLLM gives no states of tokens that it finds in its cache.

    Raises:
        InputError: what cannot work, before anything is started.
    """
    cpu = on_cpu()
    require_plugin()
    require_hidden_states(verifier, architecture, taps)
    for argument in engine_arguments:
        if argument.split("=")[0] in (*OURS, *_PREFIX_CACHING):
            raise InputError(argument, "engine flag", "blockdraft serve --extract sets it itself; leave it out")
    require_free(host, port)
    require_free(host, states_port)
    ids = sorted({*taps, num_layers})
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": _CONNECTOR,
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder), "folder_id": folder_id, "states_port": states_port,
        },
    }  # fmt: skip
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", verifier, "--dtype", dtype, "--host", host, "--port", str(port), "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)),
        *engine_arguments,
    ]
    url = f"http://{host}:{port}"
    summary = f"hidden states of {verifier} in {dtype} after layers {', '.join(map(str, ids))} at {url}"
    environment = engine_environment(threads, cpu, v1_runner=True)
    return StatesLaunch(Launch(command, environment, summary, url), folder, folder_id, states_port)
