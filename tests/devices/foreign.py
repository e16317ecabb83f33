"""A test device, "foreign": its tensors lie in CPU memory and reject what tensors of an accelerator reject.

They do not meet CPU tensors, do not index them, and do not enter kernels that exist for the CPU only. Code that forgets
a `.to(device)` fails here as it would on a GPU, on any machine.

    import devices.foreign
    model.to("foreign"); torch.zeros(3, device="foreign")

How it works: torch lets Python code be the backend of its PrivateUse1 device. A foreign tensor has a storage that is
marked as the device's and points to the memory of a CPU storage. Sizes, strides and views are therefore torch's own;
one fallback takes every operation, runs it on CPU tensors over the same memory, and marks what comes out. Under
autocast, products are cast as the lists of real devices have it.

What it cannot show: random generators of the wrong device (its own draw on the CPU), the numbers of other kernels,
streams, graphs, memory, FlexAttention and torch.compile, which reject the device. Once autograd has run on it, a
process cannot end in the usual way (the device's thread waits for Python): leave by `os._exit`. So its tests run in
child processes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "foreign"
CPU = torch.device("cpu")
# Only these may see tensors of both devices: copies, and indices that lie on the CPU.
COPIES = frozenset({"aten::_copy_from", "aten::_copy_from_and_resize", "aten::copy_", "aten::_to_copy"})
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
LOW_PRECISION = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "linalg_vecdot")
SWEEP = 4096  # storages that are made between two looks for those that nobody uses

_set = torch.ops.aten.set_.source_Storage_storage_offset
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# By address: the CPU storage, which owns the memory, and the foreign one, which only points to it.
_memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
_made = 0
_CpuGenerator = torch.Generator


class Generator(torch.Generator):
    """`torch.Generator`, which draws on the CPU for the test device."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        return _CpuGenerator("cpu" if torch.device(device).type == NAME else device)


class Module(_DummyBackendModule):
    """What torch asks of `torch.foreign`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def is_foreign(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _marked(data: Tensor) -> Tensor:
    """A foreign tensor over the memory of a CPU tensor."""
    with torch.inference_mode(False):  # a view of an ordinary tensor is an ordinary tensor in inference mode, too
        empty = torch._C._acc.create_empty_tensor((0,), data.dtype)
    return _pointed(empty, data)


def _pointed(tensor: Tensor, data: Tensor) -> Tensor:
    """Let a foreign tensor have the memory, sizes and strides of a CPU tensor."""
    storage = data.untyped_storage()
    address = storage.data_ptr()
    known = _memory.get(address) if address else None
    if known is None or known[1].nbytes() != storage.nbytes():
        _sweep()
        known = (
            storage,
            torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), storage.nbytes()),
        )
        if address:
            _memory[address] = known
    return _set.redispatch(_CPU_KEYS, tensor, known[1], data.storage_offset(), data.shape, data.stride())


def _data(tensor: Tensor) -> Tensor:
    """The CPU tensor over the memory of a foreign one."""
    plain = torch.empty(0, dtype=tensor.dtype)
    address = tensor.untyped_storage().data_ptr()
    if not address:
        return plain.resize_(tensor.shape)
    return plain.set_(_memory[address][0], tensor.storage_offset(), tensor.shape, tensor.stride())


def _sweep() -> None:
    """Now and then, give back the memory of storages that no tensor has any more."""
    global _made
    _made += 1
    if _made % SWEEP == 0:
        for address in [a for a, (_, ours) in _memory.items() if torch._C._storage_Use_Count(ours._cdata) == 1]:
            del _memory[address]


def _reject_mixtures(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if "_for_cpu" in name:
        raise RuntimeError(f"{name}: a kernel for the CPU was given tensors of the device {NAME!r}")
    if name in COPIES:
        return
    indices = {id(index) for index in args[1]} if name in INDEXING else ()
    if any(tensor.dim() and not is_foreign(tensor) and id(tensor) not in indices for tensor in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {NAME!r} and 'cpu'")


def _mapped(value: Any, change: Any) -> Any:
    """Arguments or results with `change` applied to each value in them."""
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, change) for each in value)
    return change(value)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU for foreign tensors."""
    name = op._schema.name
    if name == "aten::set_":  # of storages: nothing is computed
        return op.redispatch(_CPU_KEYS, *args, **kwargs)
    tensors: list[Tensor] = []
    ours: list[tuple[Tensor, Tensor, Any]] = []

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CPU
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        if value.device.type != NAME:
            return value
        data = next((data for tensor, data, _ in ours if tensor is value), None)
        if data is None:
            data = _data(value)
            ours.append((value, data, _geometry(data)))
        return data

    cpu_args = _mapped(args, on_cpu)
    cpu_kwargs = {key: _mapped(value, on_cpu) for key, value in kwargs.items()}
    if ours:
        _reject_mixtures(name, args, tensors)
    asked = kwargs.get("device")
    stays = asked.type == NAME if asked is not None else bool(ours)
    if name == "aten::_copy_from":  # what `copy_` is for such devices
        cpu_args[1].copy_(cpu_args[0])
        return args[1]
    found = op(*cpu_args, **cpu_kwargs)
    for tensor, data, before in ours:  # an output that was resized has other memory now
        if _geometry(data) != before:
            _pointed(tensor, data)

    def marked(value: Any) -> Any:
        if not isinstance(value, Tensor) or not stays:
            return value
        given = next((tensor for tensor, data, _ in ours if data is value), None)
        return _marked(value) if given is None else given

    return _mapped(found, marked)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.shape, tensor.stride(), tensor.storage_offset()


def _autocast(op: Any) -> Any:
    """An operation whose foreign float32 arguments are cast to autocast's dtype."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lowered(value: Any) -> Any:
            return value.to(dtype) if is_foreign(value) and value.dtype == torch.float32 else value

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*_mapped(args, lowered), **{key: _mapped(value, lowered) for key, value in kwargs.items()})

    return run


_setup_privateuseone_for_python_backend(NAME, Module())
torch.Generator = Generator  # type: ignore[misc]
_library = torch.library.Library("_", "IMPL")
_library.fallback(_fallback, "PrivateUse1")
_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_casts = torch.library.Library("aten", "IMPL")
for _name in LOW_PRECISION:
    _casts.impl(_name, _autocast(getattr(torch.ops.aten, _name).default), "AutocastPrivateUse1")
