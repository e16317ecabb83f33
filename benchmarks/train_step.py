"""Peak memory and time of a training step's head and loss, against whole logits.

Random weights; what is shown is that memory follows the chunk and not the number of slots:

    python benchmarks/train_step.py                       # vocabulary 262,144, up to 512 anchors x block 8
    python benchmarks/train_step.py --vocab 49152 --dtype float32

Each line is measured in a process of its own (peak resident memory minus what stood before the step).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from pathlib import Path
from statistics import median

HIDDEN, LAYERS, ROW, BLOCK = 576, 2, 1024, 8
WIDTHS = (8, 6, 10, 6, 9, 6, 11, 13)


def step(
    queue: multiprocessing.Queue, kind: str, anchors: int, vocab: int, dtype_name: str, repeats: int, only_head: bool
) -> None:
    """One measurement: build a draft and a packed row, then run forward and backward."""
    from blockdraft.runtime import prepare_environment

    prepare_environment()
    import torch

    from blockdraft.data.packing import pack_row
    from blockdraft.losses.chunked import chunked_head_loss, plain_head_loss
    from blockdraft.losses.objective import Objective
    from blockdraft.models.block_draft import BlockDraft
    from blockdraft.models.config import METHODS, DraftConfig
    from blockdraft.ops.anchors import choose_anchors
    from blockdraft.records import Document
    from blockdraft.training.step import block_targets

    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    config = DraftConfig(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-6,
        vocab_size=vocab,
        tap_ids=(1, 2, 3, 4, 5),
        **METHODS["dflash"],
        standardise_taps=False,
        block_size=BLOCK,
        mask_token_id=4,
        embedding_scale=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=ROW,
        windows=(None,) * LAYERS,
        causal=(False,) * LAYERS,
    )
    table = (0.02 * torch.randn(vocab, HIDDEN)).to(dtype)
    draft = BlockDraft(config)
    draft.borrow(table, table)
    draft.initialise(0)
    row = pack_row([Document("row", torch.randint(5, vocab, (ROW,)).tolist(), 4, "length")])
    taps = torch.randn(ROW, 5, HIDDEN).to(dtype)
    greedy = torch.randint(vocab, (ROW,))
    loss_of = chunked_head_loss if kind == "chunked" else plain_head_loss
    objective = Objective("dpace", 0.5, 4.0)

    given = torch.randn(anchors, BLOCK, HIDDEN).requires_grad_()

    def once() -> float:
        start = time.perf_counter()
        blocks = choose_anchors(row.loss_mask, row.lengths, anchors, torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            hidden = given if only_head else draft(taps, row.tokens, row.positions, blocks)
            targets, mask = block_targets(greedy, blocks, BLOCK)
            loss = loss_of(hidden[:, 1:], table, targets, mask, objective).loss
        loss.backward()
        return time.perf_counter() - start

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building the tables
    before = resident("VmRSS")
    seconds = [once() for _ in range(repeats)]
    queue.put((median(seconds[1:] or seconds), (resident("VmHWM") - before) / 2**20))


def resident(field: str) -> int:
    """Resident memory of this process in KiB: "VmRSS" now, "VmHWM" at its peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def measure(*arguments: object) -> tuple[float, float]:
    """Run `step` in a fresh process; returns seconds and GiB."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=step, args=(queue, *arguments))
    process.start()
    result = queue.get()
    process.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--whole-up-to", type=int, default=256, help="anchors up to which the twin is run too")
    parser.add_argument("--only-head", action="store_true", help="head and loss on given hidden states, no draft")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    print(f"vocabulary {options.vocab:,}, {options.dtype}, row of {ROW}, block {BLOCK}, {LAYERS} layers of {HIDDEN}")
    names = ("anchors", "slots", "chunked s", "GiB", "whole s", "GiB", "time ratio", "memory ratio")
    print(" ".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)))
    for anchors in options.anchors:
        fast = measure("chunked", anchors, options.vocab, options.dtype, options.repeats, options.only_head)
        plain = (math.nan, math.nan)
        if anchors <= options.whole_up_to:
            plain = measure("plain", anchors, options.vocab, options.dtype, options.repeats, options.only_head)
        counts = (str(anchors), str(anchors * (BLOCK - 1)))
        figures = (*fast, *plain, plain[0] / fast[0], plain[1] / fast[1])
        cells = (*counts, *(f"{figure:.2f}" for figure in figures))
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)


if __name__ == "__main__":
    main()
