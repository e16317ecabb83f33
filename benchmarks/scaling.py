"""Training by two processes against one: seconds of a step, and how much of it goes into collectives.

    python benchmarks/scaling.py                             # two minutes on two cores
    python benchmarks/scaling.py --out docs/results.md

The same rows a step in all arms: one process with two threads and two rows, and two processes with one thread and a row
each, with the draft copied and divided. A random verifier; hidden states are kept in memory. Arms take turns; seconds
are medians of steps after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from blockdraft.runtime import machine_description, prepare_environment
from report import markdown_table, today, write_section

prepare_environment()

ARMS = {  # processes, threads of each, rows of a step in each, divided
    "one process, two threads": (1, 2, 2, False),
    "two processes, copied": (2, 1, 1, False),
    "two processes, divided": (2, 1, 1, True),
}


def worker(folder: Path, threads: int, rows: int, divided: bool, steps: int, hidden: int, length: int) -> None:
    """Train some steps; the first process writes their seconds, and those of its collectives."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from blockdraft.records import Example
    from blockdraft.settings import TrainSettings
    from blockdraft.training.plan import TrainingPlan
    from blockdraft.training.processes import joined
    from blockdraft.training.trainer import Trainer
    from blockdraft.verifiers.causal import CausalVerifier

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=4096,
    )  # fmt: skip
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    verifier = CausalVerifier(LlamaForCausalLM(config), tokenizer, "random")
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(10, 8000, (length,), generator=generator).tolist() for _ in range(8)]
    examples = [Example.of_reply(str(number), each[:16], each[16:], "length") for number, each in enumerate(ids)]
    spent = 0.0

    def clocked(call: Any) -> Any:
        def run(*arguments: Any, **more: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                spent += time.perf_counter() - start

        return run

    with joined("cpu") as processes:
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
            setattr(dist, name, clocked(getattr(dist, name)))
        settings = TrainSettings(
            dtype="float32", data_path=folder, save_path=folder / "run", num_taps=3, num_layers=3, epochs=1e4,
            total_seq_len=length, max_anchors=96, mask_token_id=8100, train_data_ratio=0.8, logger="none",
            grad_accum=rows, fsdp_shard=divided,
        )  # fmt: skip
        trainer = Trainer.fresh(TrainingPlan(settings, verifier, examples, processes=processes))
        seconds, waited = [], []
        for step in range(steps + 1):
            spent, start = 0.0, time.perf_counter()
            trainer._update(step, 1.0)
            seconds.append(time.perf_counter() - start)
            waited.append(spent)
        if processes.first:
            size = sum(parameter.numel() for parameter in trainer.draft.parameters())
            result = {"seconds": seconds[1:], "collectives": waited[1:], "parameters": size}
            (folder / "result.json").write_text(json.dumps(result))


def measured(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    count, threads, rows, divided = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        given = [folder, threads, rows, int(divided), options.steps, options.hidden, options.length]
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count] if count > 1 else []
        command = [str(each) for each in (sys.executable, *start, __file__, "--worker", *given)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of an arm in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512, help="width of the verifier and the draft")
    parser.add_argument("--length", type=int, default=768, help="tokens of a row")
    parser.add_argument("--out", type=Path, help="file whose section `scaling` is replaced by the table")
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, *numbers = options.worker
        threads, rows, divided, steps, hidden, length = map(int, numbers)
        worker(Path(folder), threads, rows, bool(divided), steps, hidden, length)
        return
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for _ in range(options.turns):
        for arm in ARMS:
            found[arm].append(measured(arm, options))
    rows, first = [], None
    for arm, results in found.items():
        seconds = median(second for result in results for second in result["seconds"])
        collectives = median(second for result in results for second in result["collectives"])
        first = first or seconds
        rows.append([arm, f"{seconds:.2f}", f"{first / seconds:.2f}", f"{collectives / seconds:.0%}"])
    table = markdown_table(["arm", "s / step", "speed", "of it in collectives"], rows)
    size = found["two processes, copied"][0]["parameters"] / 1e6
    command = f"python benchmarks/scaling.py {' '.join(sys.argv[1:])}"
    text = (
        f"`{command}`, {today()}; {machine_description()}; a draft of {size:.0f}M parameters over "
        f"gloo. Collectives of a divided draft overlap with its work; the share counts what the caller waits for."
        f"\n\n{table}"
    )
    print(text)
    if options.out:
        write_section(options.out, "scaling", text)


if __name__ == "__main__":
    main()
