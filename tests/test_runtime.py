"""What a CPU is and can do, as torch reports it."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from blockdraft.runtime import has_fast_bfloat16, machine_description


def pretend(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, Any]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(capabilities))


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": True}, False),
        ({"architecture": "arm64", "bf16": True}, True),
        ({"architecture": "arm64", "bf16": False, "fp16_arith": True}, False),
    ],
)
def test_bfloat16_is_fast_where_the_cpu_multiplies_it(
    capabilities: dict[str, Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capabilities)
    assert has_fast_bfloat16("cpu") is native
    assert ("no native bfloat16" in machine_description()) is not native


def test_torch_and_the_kernel_agree_on_bfloat16() -> None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        pytest.skip("no /proc/cpuinfo")
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    assert has_fast_bfloat16("cpu") is bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def test_a_machine_is_named_by_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_description().startswith(str(torch.cpu.get_capabilities().get("cpu_name") or ""))
    pretend(monkeypatch, {"cpu_name": "Some CPU"})
    assert machine_description().startswith("Some CPU, ")
    pretend(monkeypatch, {})  # as on ARM
    assert not machine_description().startswith((",", "None"))
