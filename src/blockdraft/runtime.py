"""Choosing device, dtype and threads for the machine at hand; nothing here computes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blockdraft.choices import Dtype, words
from blockdraft.errors import InputError

if TYPE_CHECKING:
    import torch


def prepare_environment() -> None:
    """Set what must be set before torch is imported.

    A passive OpenMP wait policy keeps two processes on one small machine from spinning each other down; tokenizers
    must not fork their own threads under a progress bar. Existing values win.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def limit_threads(num_threads: int) -> None:
    """Use `num_threads` CPU threads for tensor work; 0 keeps torch's own choice."""
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)


def process_place() -> tuple[int, int]:
    """This process's number and the count of a run's processes, as `torchrun` states them; (0, 1) without it.

    Raises:
        InputError: the environment states something else than such numbers.
    """
    stated = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (all(each.isdecimal() for each in stated) and int(stated[0]) < int(stated[1])):
        raise InputError("RANK and WORLD_SIZE", " and ".join(stated), "start several processes by torchrun")
    return int(stated[0]), int(stated[1])


def resolve_device(name: str) -> str:
    """The torch device that a name stands for; "auto" is CUDA where there is one, else the CPU.

    Other accelerators are used when they are named: "auto" takes no device that nobody has run this on. Among several
    processes of a machine, each takes the device of its own number.

    Raises:
        InputError: torch knows no such device, or finds none on this machine.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if process_place()[1] == 1:
            return name
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("--device", name, "torch knows no such device; give auto, cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return "cpu"
    if ":" not in name and process_place()[1] > 1:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
    count = _num_devices(device.type)
    if not count:
        raise InputError("--device", name, f"torch {torch.__version__} finds none on this machine; give auto or cpu")
    if (device.index or 0) >= count:
        raise InputError("--device", name, f"the last one on this machine is {device.type}:{count - 1}")
    return str(device)


def _num_devices(kind: str) -> int:
    """Devices of a torch device type on this machine."""
    import torch

    try:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):  # a type without a module, or one that is not made for tensors
        return 0


def has_fast_bfloat16(device: str | torch.device) -> bool:
    """Whether a device multiplies bfloat16 natively; emulated bfloat16 is slower than float32."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def resolve_dtype(name: str, device: str | torch.device, field: str = "--dtype") -> torch.dtype:
    """Turn a dtype's name into the torch dtype; "auto" is bfloat16 where the device has it, else float32."""
    import torch

    if name not in words(Dtype):
        raise InputError(field, name, f"choose one of {', '.join(words(Dtype))}")
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def memory_gib() -> float:
    """The most memory this process has held so far, in GiB: of its CUDA device if it uses one, else of the machine."""
    import resource
    import sys

    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16, as written in configs."""
    return str(dtype).removeprefix("torch.")


def machine_description(device: str | torch.device = "cpu") -> str:
    """One line that names in results what computed them: the device, CPU threads in use, native bfloat16."""
    import platform

    import torch

    device = torch.device(device)
    model = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    if device.type != "cpu":
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} beside {model}"
    bfloat16 = "native bfloat16" if has_fast_bfloat16(device) else "no native bfloat16"
    return f"{model}, {torch.get_num_threads()} threads, {bfloat16}, torch {torch.__version__}"
