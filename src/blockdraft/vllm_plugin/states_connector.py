"""A connector that gives the hidden states of prompts to trainers; `blockdraft serve --extract` starts vLLM with it.

vLLM 0.32's own ExampleHiddenStatesConnector writes them to a folder, on CUDA alone and with a lock file beside each.
This one writes on any device, whole files or none, keeps the folder from filling up, and says with each answer which
layers a file has and where else than in the folder it can be had (`serving.states_files`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

MAX_FILES = 1024  # beyond it the oldest is dropped: a trainer that was killed leaves some behind


class _Done:
    """Stands for the end of a copy that is over already."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class BlockdraftStatesConnector(ExampleHiddenStatesConnector):
    """See the module. `kv_connector_extra_config` has `shared_storage_path`, `folder_id` and `states_port`."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.use_lock = False
        speculative = self._vllm_config.speculative_config
        assert speculative is not None
        ids = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", [])
        self._facts = {
            "layer_ids": list(ids),
            "folder_id": self._kv_transfer_config.get_from_extra_config("folder_id", None),
            "states_port": self._kv_transfer_config.get_from_extra_config("states_port", None),
        }

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        if vllm_config.device_config.device_type == "cpu":  # which has one layout, and rejects a wish for another
            return None
        return super().get_required_kvcache_layout(vllm_config)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delays, answer = super().request_finished(request, block_ids)
        return delays, answer if answer is None else {**answer, **self._facts}

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None = None) -> None:
        """In a thread: write under another name, then give the file its own."""
        event.synchronize()
        path = Path(filename)
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.replace(path)
        drop_oldest(path.parent)

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
        # A copy: the blocks are given to other requests while the file is written.
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).to("cpu", copy=True).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        future = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, None)
        self._req_copy_events[pending.req_id] = _Done()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))


def drop_oldest(folder: Path, most: int = MAX_FILES) -> None:
    """Remove the oldest files of states that are too many; who removes them first does not matter."""
    found = list(folder.glob("*.safetensors"))
    if len(found) <= most:
        return
    ages = []
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages)[: len(found) - most]:
        path.unlink(missing_ok=True)
