"""Choosing dtype and threads for the machine at hand; nothing here computes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from blockdraft.errors import InputError

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16")


def prepare_environment() -> None:
    """Set what must be set before torch is imported.

    A passive OpenMP wait policy keeps two processes on one small machine from spinning each other down; tokenizers
    must not fork their own threads under a progress bar. Existing values win.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def limit_threads(num_threads: int) -> None:
    """Use `num_threads` processor threads for tensor work; 0 keeps torch's own choice."""
    import torch

    if num_threads:
        torch.set_num_threads(num_threads)


def has_fast_bfloat16() -> bool:
    """Whether this processor (or GPU) multiplies bfloat16 natively; emulated bfloat16 is slower than float32."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:  # noqa: PTH123 - a device, not a file
        flags = next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")
        return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    return False


def resolve_dtype(name: str, field: str = "--dtype") -> torch.dtype:
    """Turn a dtype's name into the torch dtype; "auto" is bfloat16 where the processor has it, else float32."""
    import torch

    if name not in DTYPES:
        raise InputError(field, name, f"choose one of {', '.join(DTYPES)}")
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def resolve_device(name: str) -> str:
    """A torch device by its name; "auto" is the GPU where there is one, else the processor."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16, as written in configs."""
    return str(dtype).removeprefix("torch.")


def machine_description() -> str:
    """One line that names the machine in results: processor, cores in use, native bfloat16."""
    import platform

    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:  # noqa: PTH123 - a device, not a file
        model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), model)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else model
    bfloat16 = "native bfloat16" if has_fast_bfloat16() else "no native bfloat16"
    return f"{device}, {torch.get_num_threads()} threads, {bfloat16}, torch {torch.__version__}"
