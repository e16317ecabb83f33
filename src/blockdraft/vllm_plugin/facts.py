"""What the plugin's parts know of the engine they run in and of the checkpoint that it serves."""

from __future__ import annotations

import os
from typing import Any

from blockdraft.checkpoints.speculators import parse_config
from blockdraft.contract import Contract

STATED = "blockdraft_checkpoint"  # where the engine's draft config keeps the whole config.json of the checkpoint


def on_v1_runner() -> bool:
    """Whether the engine uses its V1 model runner: on CPUs always, on CUDA when told so."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


def contract_in(engine_config: Any) -> Contract:
    """The contract of the checkpoint behind an engine's draft config."""
    return parse_config(getattr(engine_config, STATED), "config.json")
