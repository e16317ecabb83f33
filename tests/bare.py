"""Commands in a process that lacks the packages of the extra `train`, as on a host that was set up to serve."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from blockdraft.extras import TRAIN

_CHILD = """
import contextlib, io, json, sys
blocked, commands, code = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(blocked))  # an import of what is None there fails
from blockdraft.cli.main import run
exec(code)
for command in commands:
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        status = run(command)
    print("RAN " + json.dumps([status, out.getvalue(), said.getvalue()]))
"""


def run_bare(
    *commands: Sequence[object], blocked: Sequence[str] = (*TRAIN, "pandas"), code: str = ""
) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each command.

    Args:
        code: run before them.
    """
    given = json.dumps([list(blocked), [[str(word) for word in command] for command in commands], code])
    done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line[4:])) for line in done.stdout.splitlines() if line.startswith("RAN ")]
