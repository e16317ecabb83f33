"""DFlash, DFlare and DSpark at equal minutes: acceptance and speed of each, and how acceptance grew while training.

    python benchmarks/acceptance.py --minutes 6 --out docs/results.md

Runs `blockdraft quickstart` for each workload and method (what is finished already is read, not repeated): the same
replies, the same held-out prompts, as many steps as fit into the minutes. With --out the tables are written with
machine and date into their section of the file, and the curves beside it as acceptance.svg. Nothing else should run on
the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import markdown_table, today, write_section

RUNS = [f"{workload}/{method}" for workload in ("records", "chat") for method in ("dflash", "dflare", "dspark")]
COLUMNS = (
    "workload",
    "method",
    "steps",
    "K=3",
    "K=7",
    "tokens/s plain",
    "tokens/s draft",
    "ratio",
    "identical (float32)",
    "identical / ties / mismatches (served dtype)",
    "widest gap of a difference / bound measured",
)


def run(workload: str, method: str, minutes: float, folder: Path, max_heldout: int) -> dict[str, Any]:
    """One quickstart run, as its JSON object."""
    command = [sys.executable, "-m", "blockdraft.cli.main", "quickstart", "--json", "--workload", workload]
    command += ["--method", method, "--minutes", str(minutes), "--save-path", str(folder)]
    command += ["--max-heldout", str(max_heldout)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def row_of(result: dict[str, Any]) -> list[str]:
    """A result as the cells of COLUMNS."""
    lengths, rate, served = result["acceptance_length"], result["tokens_per_second"], result["served_dtype"]
    return [
        result["workload"],
        result["method"],
        str(result["training"]["steps"]),
        f"{lengths['3']:.2f}",
        f"{lengths['7']:.2f}",
        f"{rate['plain']:.1f}",
        f"{rate['draft']:.1f}",
        f"{result['speedup']:.2f}",
        f"{result['identical']} of {result['heldout_prompts']}",
        f"{served['identical']} / {served['ties']} / {served['mismatches']}",
        f"{served['largest_gap']:.2f} / {served['tie_bound']:.2f}",
    ]


def growth_table(results: Sequence[dict[str, Any]], minutes: float, num_columns: int = 6) -> str:
    """Acceptance on the validation examples, the last value up to each of some minutes."""
    marks = [minutes * (i + 1) / num_columns for i in range(num_columns)]
    rows = []
    for result in results:
        history = result["training"]["history"]
        cells = [result["workload"], result["method"]]
        for mark in marks:
            # The last steps may take a little longer than planned; they belong to the last column.
            past = [h for h in history if h["seconds"] <= 60 * mark or mark == marks[-1]]
            cells.append(f"{past[-1]['acceptance_length']:.2f}" if past else "")
        rows.append(cells)
    return markdown_table(["workload", "method", *(f"{mark:g} min" for mark in marks)], rows)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves, one picture a workload side by side."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(result["workload"] for result in results))
    figure, axes = plt.subplots(1, len(workloads), figsize=(5 * len(workloads), 3.6), squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        for result in results:
            if result["workload"] == workload:
                history = result["training"]["history"]
                minutes = [entry["seconds"] / 60 for entry in history]
                axis.plot(
                    minutes, [entry["acceptance_length"] for entry in history], marker="o", label=result["method"]
                )
        axis.set(title=workload, xlabel="minutes of training", ylabel="acceptance length, validation", ylim=(1, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--runs", nargs="+", default=RUNS, help="workload/method")
    parser.add_argument("--max-heldout", type=int, default=0, help="decode the first so many held-out prompts; 0 all")
    parser.add_argument("--save-path", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--section", default="acceptance", help="section of --out, and name of the figure beside it")
    options = parser.parse_args()
    results = [run(*each.split("/"), options.minutes, options.save_path, options.max_heldout) for each in options.runs]
    table = markdown_table(COLUMNS, [row_of(result) for result in results])
    growth = growth_table(results, options.minutes)
    print(table, growth, sep="\n\n")
    if options.out:
        first = results[0]
        figure = options.out.with_name(f"{options.section}.svg")
        draw(results, figure)
        text = (
            f"## Acceptance: {', '.join(dict.fromkeys(result['workload'] for result in results))}\n\n"
            f"`python benchmarks/acceptance.py {' '.join(sys.argv[1:])}`, "
            f"{today()}; {first['machine']}; "
            f"{first['dtype']}; verifier {first['verifier']}; batch 1, prefill included; "
            f"{options.minutes:g} minutes of training each. "
            "A tie is a first difference whose two tokens lie within the bound of the best float32 logit.\n\n"
            f"{table}\n\n"
            "Exact acceptance on the validation set (5% of the training replies; each draft at its own "
            "largest K, which is 7, for DSpark 8) while it was trained, one run each under a cosine schedule that "
            "ends with it:\n\n"
            f"{growth}\n\n![Acceptance while training]({figure.name})"
        )
        write_section(options.out, options.section, text)


if __name__ == "__main__":
    main()
