"""Checks that run on any device: what the CPU does there, and with its results.

`python -m devices.checks DEVICE [PART ...]` runs them (or those whose name has such a part) and prints a line of JSON
for each: {name: null or what went wrong}. DEVICE is the test device "foreign" or a real one. It is a process of its
own, since the test device changes torch for good.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

if __name__ == "__main__" and sys.argv[1] == "foreign":
    import devices.foreign  # noqa: F401 - makes the device

import torch

from devices import commands, decoding, training
from devices.stage import Check

CHECKS: tuple[Check, ...] = (*training.CHECKS, *decoding.CHECKS, *commands.CHECKS)


def main() -> None:
    device = sys.argv[1]
    torch.manual_seed(0)
    for check in CHECKS:
        if sys.argv[2:] and not any(part in check.name for part in sys.argv[2:]):
            continue
        problem = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                check.run(device, Path(folder))
            except BaseException:
                problem = traceback.format_exc()
        print(json.dumps({check.name: problem}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
