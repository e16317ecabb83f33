"""The verifier's own replies to requests, decoded in this process.

Requests are decoded in fixed batches, longest first, and every finished batch is put into the journal at once. Batches
are fixed since a row's rounding depends on its neighbours: a run that was killed and goes on computes the same replies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from blockdraft.data.journal import Journal, Written
from blockdraft.data.requests import Request
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.progress import progress
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.base import Verifier


def write_replies(
    verifier: Verifier, requests: Sequence[Request], sampling: SamplingSettings, batch_size: int, journal: Journal
) -> None:
    """Decode what the journal does not have yet, and put it there."""
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt), index))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    done = [all(journal.get(requests[i].id, requests[i].turn) for i in batch) for batch in batches]
    finished = sum(len(batch) for batch, is_done in zip(batches, done, strict=True) if is_done)
    with progress("replies", len(requests), finished) as advance:
        for number, (batch, is_done) in enumerate(zip(batches, done, strict=True)):
            if is_done:
                continue
            chosen = [requests[index] for index in batch]
            # Each batch draws from a stream of its own, or all would sample alike.
            drawn = dataclasses.replace(sampling, seed=sampling.seed * 1_000_003 + number)
            engine = DecodingEngine(verifier, None, 0, drawn)
            replies = engine.generate([request.prompt for request in chosen], batch_size, on_done=advance)
            journal.add(
                Written(request.id, request.turn, reply.tokens) for request, reply in zip(chosen, replies, strict=True)
            )
