"""The picture of supervised tokens in the README, from `blockdraft prepare --preview`.

python benchmarks/preview.py --out docs/preview.svg
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

from blockdraft.runtime import prepare_environment

prepare_environment()

from rich.console import Console  # noqa: E402

from blockdraft.cli import tables  # noqa: E402
from blockdraft.pipeline.prepare import prepare  # noqa: E402
from blockdraft.settings import PrepareSettings  # noqa: E402

TALK = [
    {"role": "user", "content": "Is 7 a prime number? One word."},
    {"role": "assistant", "content": "Yes.", "weight": 0},
    {"role": "user", "content": "And 9?"},
    {"role": "assistant", "content": "No, it is 3 times 3."},
    {"role": "user", "content": "And 11?"},
    {"role": "assistant", "content": "Yes."},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "talk.jsonl"
        path.write_text(json.dumps({"messages": TALK}), encoding="utf-8")
        settings = PrepareSettings(verifier_name_or_path=options.verifier, source=(f"chat={path}",), preview=1)
        result = prepare(settings)
    console = Console(record=True, width=80, quiet=False, force_terminal=True)
    tables.show_prepared(result, console)
    picture = console.export_svg(title="blockdraft prepare --source chat=talk.jsonl --preview 1")
    # Fonts from elsewhere are not loaded where pictures are shown; the names of local ones stay.
    options.out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
