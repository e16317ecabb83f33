"""Drafts of every method for a small T5Gemma 2: acceptance, speed and parity with vLLM on held-out sources.

    python tests/assets/t5gemma2.py runs/t5gemma2 --pairs e2e_dev.csv
    python benchmarks/t5gemma2_drafts.py runs/t5gemma2 --out docs/results.md

The first command trains a verifier of 1.6M parameters on pairs (the E2E challenge's: a restaurant's facts and a
sentence about them); sources are held out whole. Each draft learns the verifier's own replies to the other sources, in
float32. Decoding is the reference engine's, with and without the draft in turns at each batch size. Nothing else should
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from blockdraft.runtime import prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

from blockdraft.pipeline.evaluate import evaluate  # noqa: E402
from blockdraft.pipeline.parity import parity  # noqa: E402
from blockdraft.pipeline.prepare import prepare  # noqa: E402
from blockdraft.pipeline.regenerate import regenerate  # noqa: E402
from blockdraft.pipeline.train import train  # noqa: E402
from blockdraft.runtime import machine_description  # noqa: E402
from blockdraft.settings import (  # noqa: E402
    EvaluateSettings,
    ParitySettings,
    PrepareSettings,
    RegenerateSettings,
    TrainSettings,
)

METHODS = ("dflash", "dflare", "dspark")
COLUMNS = (
    "method", "minutes of training", "K", "acceptance length", "in vLLM", "in vLLM, tokens behind an end counted",
    "parity mismatches", "batch", "tokens/s without", "with the draft", "ratio", "identical",
)  # fmt: skip


def draft_of(method: str, verifier: str, data: Path, folder: Path, epochs: float) -> tuple[Path, float]:
    """A trained draft, and the minutes that it took."""
    settings = TrainSettings(
        verifier_name_or_path=verifier, dtype="float32", data_path=data, save_path=folder / method,
        speculator_type=method, logger="none", total_seq_len=1024, epochs=epochs, max_anchors=256,
        num_layers=2, lr=2e-3, muon_lr=4e-2,
    )  # fmt: skip
    start = time.monotonic()
    checkpoint = Path(train(settings)["checkpoint"])
    return checkpoint, (time.monotonic() - start) / 60


def measured(checkpoint: Path, heldout: Path, options: argparse.Namespace) -> list[list[str]]:
    """A row for every K and batch size, from "K" on in COLUMNS."""
    common: dict[str, Any] = {
        "checkpoint": checkpoint, "dtype": "float32", "data_path": heldout, "k": tuple(options.k),
        "max_new_tokens": options.max_tokens, "max_prompts": options.prompts,
    }  # fmt: skip
    served = parity(ParitySettings(**common))
    rows = []
    for batch in options.batch:
        found = evaluate(EvaluateSettings(**common, decode=True, batch_size=batch))
        for k in map(str, options.k):
            decoded, one = found["decoding"][k], served["k"][k]
            rows.append(
                [
                    k,
                    f"{decoded['acceptance_length']:.3f}",
                    f"{one['acceptance_length']['vllm']:.3f}",
                    f"{one['acceptance_length']['vllm_counters']:.3f}",
                    str(one["mismatches"]),
                    str(batch),
                    f"{decoded['plain_tokens_per_second']:.0f}",
                    f"{decoded['draft_tokens_per_second']:.0f}",
                    f"{decoded['speedup']:.2f}",
                    f"{decoded['identical']} of {found['prompts']}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asset", type=Path, help="folder that tests/assets/t5gemma2.py wrote")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epochs", type=float, default=40.0)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=0, help="sources to learn from; 0: all")
    parser.add_argument("--prompts", type=int, default=0, help="held-out sources; 0: all")
    parser.add_argument("--out", type=Path, help="file whose section t5gemma2-drafts is replaced by the table")
    options = parser.parse_args()
    verifier, heldout = str(options.asset / "verifier"), options.asset / "heldout.jsonl"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = (f"pairs={options.asset / 'train.jsonl'}" + (f"@{options.rows}" if options.rows else ""),)
        prepare(
            PrepareSettings(
                verifier_name_or_path=verifier, source=source, prompts_only=True, save_path=folder / "prompts"
            )
        )
        regenerate(
            RegenerateSettings(
                verifier_name_or_path=verifier, dtype="float32", data_path=folder / "prompts",
                save_path=folder / "data", max_new_tokens=options.max_tokens,
            )
        )  # fmt: skip
        for method in options.methods:
            checkpoint, minutes = draft_of(method, verifier, folder / "data", folder, options.epochs)
            for row in measured(checkpoint, heldout, options):
                rows.append([method, f"{minutes:.1f}", *row])
                print(" | ".join(rows[-1]), flush=True)
    if options.out:
        heading = f"`python benchmarks/t5gemma2_drafts.py ASSET`, {today()}; {machine_description()}."
        write_section(options.out, "t5gemma2-drafts", f"{heading}\n\n{markdown_table(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
