"""DFlash and DFlare at equal minutes, and the second workload: one table from real quickstart runs.

    python benchmarks/methods.py --minutes 6 --out docs/results.md

Runs `blockdraft quickstart` for each method and workload (what is finished already is read, not repeated) and
prints acceptance and the wall-clock ratio of each. With --out the table is written with machine and date into its
section of the file. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

from report import markdown_table, today, write_section

COLUMNS = (
    "workload",
    "method",
    "K=3",
    "K=7",
    "tokens/s plain",
    "tokens/s draft",
    "ratio",
    "identical (float32)",
    "identical / ties / faults (served dtype)",
    "widest gap of a difference / bound measured",
)


def run(workload: str, method: str, minutes: float, folder: Path) -> dict:
    """One quickstart run, as its JSON object."""
    command = [sys.executable, "-m", "blockdraft.cli.main", "quickstart", "--json", "--workload", workload]
    command += ["--method", method, "--minutes", str(minutes), "--save-path", str(folder)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def row_of(result: dict) -> list[str]:
    """A result as the cells of COLUMNS."""
    lengths, rate, served = result["acceptance_length"], result["tokens_per_second"], result["served_dtype"]
    return [
        result["workload"],
        result["method"],
        f"{lengths['3']:.2f}",
        f"{lengths['7']:.2f}",
        f"{rate['plain']:.1f}",
        f"{rate['draft']:.1f}",
        f"{result['speedup']:.2f}",
        f"{result['identical']} of {result['heldout_prompts']}",
        f"{served['identical']} / {served['ties']} / {served['faults']}",
        f"{served['largest_gap']:.2f} / {served['tie_bound']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--workloads", nargs="+", default=["records", "chat"])
    parser.add_argument("--methods", nargs="+", default=["dflash", "dflare"])
    parser.add_argument("--save-path", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [
        run(workload, method, options.minutes, options.save_path)
        for workload, method in itertools.product(options.workloads, options.methods)
    ]
    table = markdown_table(COLUMNS, [row_of(result) for result in results])
    print(table)
    if options.out:
        first = results[0]
        head = (
            "## Methods and workloads\n\n"
            f"`python benchmarks/methods.py --minutes {options.minutes:g}`, {today()}; {first['machine']}; "
            f"{first['dtype']}; verifier {first['verifier']}; batch 1, prefill included; "
            f"{options.minutes:g} minutes of training each. "
            "A tie is a first difference whose two tokens lie within the bound of the best float32 logit.\n\n"
        )
        write_section(options.out, "methods", head + table)


if __name__ == "__main__":
    main()
