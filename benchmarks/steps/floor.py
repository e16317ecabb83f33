"""A worker: only the matrix products that a DFlash step cannot avoid, in the case's dtype.

Counted: every linear layer over the blocks' slots, forward and twice backward; the context's fusion and its keys and
values; scores and weighted values over the context that is visible on average; the head for supervised slots, forward
and the gradient of its input; with kl the teacher's head for every supervised position. Nothing else: no norm, no
softmax, no embedding, no optimizer.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from protocol import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    PROMPT,
    TAPS,
    Case,
    serve,
)

CHUNK_BYTES = 24 * 2**20  # logits of a chunk, as training has them: whole ones would cost page faults, not products


def products(case: Case) -> list[tuple[int, int, int, int]]:
    """(times, m, k, n) of every product [m, k] @ [k, n]."""
    slots, context = case.anchors * BLOCK, case.seq_len
    size, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = [(HIDDEN, size), (size, HIDDEN), (HIDDEN, kv), (HIDDEN, kv)]
    layer += [(HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
    found = []
    for width_in, width_out in layer:
        found += _linear(slots, width_in, width_out)
    for _ in ("keys", "values"):
        found += _linear(context, HIDDEN, kv)
    # Scores and values over half the row: twice forward, four times backward.
    rows = case.anchors * BLOCK * HEADS // KV_HEADS
    found += [(3 * KV_HEADS, rows, HEAD_DIM, context // 2), (3 * KV_HEADS, rows, context // 2, HEAD_DIM)]
    found = [(LAYERS * times, m, k, n) for times, m, k, n in found]
    fused = len(TAPS) * HIDDEN
    found += [(1, context, fused, HIDDEN), (1, HIDDEN, context, fused)]  # the taps need no gradient
    predicted = case.anchors * (BLOCK - 1)
    chunk = max(64, CHUNK_BYTES // (4 * case.vocab))
    heads = -(-predicted // chunk)
    found += [(heads, chunk, HIDDEN, case.vocab), (heads, chunk, case.vocab, HIDDEN)]
    if case.loss == "kl":
        positions = min(predicted, case.seq_len - PROMPT)
        found.append((-(-positions // chunk), chunk, HIDDEN, case.vocab))
    return found


def _linear(rows: int, width_in: int, width_out: int) -> list[tuple[int, int, int, int]]:
    return [(1, rows, width_in, width_out), (1, rows, width_out, width_in), (1, width_out, rows, width_in)]


def main() -> None:
    case = Case.from_argv()
    dtype = getattr(torch, case.dtype)
    ready = []
    for times, m, k, n in products(case):
        # As linear layers have it: the second factor's rows are outputs.
        ready.append(
            (times, torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).T, torch.empty(m, n, dtype=dtype))
        )

    def step() -> float:
        for times, left, right, out in ready:
            for _ in range(times):
                torch.mm(left, right, out=out)
        return 0.0

    serve(step)


if __name__ == "__main__":
    main()
