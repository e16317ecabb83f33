"""A draft whose weights, gradients and optimizer moments are divided among processes (FSDP2).

torch's `fully_shard` gathers the weights of one layer while that layer runs. States on disk are whole tensors, as those
of one process are, so that any number of processes resumes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from blockdraft.models.block_draft import BlockDraft
from blockdraft.training.processes import Processes, whole


def shard(draft: BlockDraft, processes: Processes) -> None:
    """Divide a draft, whose weights are the same in all processes, layer by layer."""
    mesh = init_device_mesh(torch.device(processes.device).type, (processes.count,))
    for module in (*draft.layers, draft):
        fully_shard(module, mesh=mesh)
    for module in draft.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the slots of the whole step already, so gradients are summed. Gloo has no scaled
            # reduction: without the second call the factor of one would ask it for one.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def is_sharded(draft: BlockDraft) -> bool:
    """Whether a draft is divided."""
    return isinstance(draft, FSDPModule)


def whole_state(state: Any) -> Any:
    """A state with every divided tensor gathered; all processes must ask together."""
    return tree_map_only(DTensor, whole, state)


def whole_draft(draft: BlockDraft) -> BlockDraft:
    """The draft itself, or a whole copy of a divided one; all processes must ask together."""
    if not is_sharded(draft):
        return draft
    copy = BlockDraft(draft.config).to(next(draft.parameters()).device)
    copy.load_state_dict(whole_state(draft.state_dict()))
    copy.share_as(draft)
    return copy


def load_whole(draft: BlockDraft, state: dict[str, Tensor]) -> None:
    """`load_state_dict` of whole tensors.

    Raises:
        RuntimeError: the state is of another draft.
    """
    own = draft.state_dict()
    for name, tensor in state.items():
        if name in own and tensor.shape != own[name].shape:
            raise RuntimeError(f"{name} is {list(tensor.shape)}, not {list(own[name].shape)}")
    divided = {name: divided_as(tensor, own[name]) if name in own else tensor for name, tensor in state.items()}
    draft.load_state_dict(divided)


def divided_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same in all processes, divided as another of its shape is."""
    if not isinstance(like, DTensor):
        return tensor
    moved = tensor.to(like.device, like.dtype)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
