"""The prompts that ship with the package, by workload; each has a fixed held-out part.

No held-out prompt is a training prompt; each workload says what else its held-out part has that training has not.
"""

from __future__ import annotations

from collections.abc import Callable

from blockdraft.data.conversations import Messages
from blockdraft.data.workloads import chat, records
from blockdraft.errors import InputError

WORKLOADS: dict[str, tuple[Callable[[], list[Messages]], Callable[[], list[Messages]]]] = {
    "records": (records.train, records.heldout),
    "chat": (chat.train, chat.heldout),
}


def workload_prompts(workload: str) -> tuple[list[Messages], list[Messages]]:
    """Training and held-out prompts of a workload, each a conversation that ends with a user turn."""
    if workload not in WORKLOADS:
        raise InputError("--workload", workload, f"choose one of {', '.join(WORKLOADS)}")
    train, heldout = WORKLOADS[workload]
    return train(), heldout()
