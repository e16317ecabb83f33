"""Rows as nobody writes them on purpose: any value in the place of any other."""

from __future__ import annotations

import datetime
import decimal
import os
from typing import Any

from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("BLOCKDRAFT_FUZZ_EXAMPLES", "400"))

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["\ud800", "a\u2028b", "\x85", "\0", " ", "### Human: a### Assistant: b", "<think>", "[]", '[{"a": null}]', "{"]
)
NUMBERS = st.integers(-3, 40) | st.sampled_from([2**31, 2**63, -(2**70), 10**4000, 0.5, float("nan"), float("inf")])
OTHERS = st.sampled_from([datetime.date(2020, 1, 1), b"\xff", decimal.Decimal("1.5"), {1, 2}, (1, 2), object])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | OTHERS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)

ROLES = st.sampled_from(["user", "human", "assistant", "gpt", "system", "tool", "function_call", "observer"])
TURNS = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value", "text", "weight", "train", "reasoning_content", "tool_calls",
                     "tool_call_id", "name"]),
    ROLES | VALUES | st.just([{"type": "text", "text": "a"}]) | st.just([{"type": "text", "text": None}]),
    max_size=5,
)  # fmt: skip
CONVERSATIONS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS | VALUES}) | TURNS | VALUES, max_size=4)
SPANS = st.lists(st.lists(st.integers(-1, 9), max_size=3), max_size=3)
IDS = st.lists(st.integers(-1, 200), max_size=8)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("messages", "conversations", "prompt", "completion", "dialog"), CONVERSATIONS | VALUES),
    **dict.fromkeys(("turns", "instances"), st.lists(VALUES, max_size=3) | VALUES),
    **dict.fromkeys(("input_ids", "source_ids", "encoder_input_ids", "labels", "loss_mask"), IDS | VALUES),
    "targets": SPANS | VALUES,
    **dict.fromkeys(
        ("question", "answer", "instruction", "input", "output", "text", "code", "response", "system", "id", "tools",
         "source", "target", "other"),
        TEXTS | VALUES,
    ),
}  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> Any:
    """A row: some known columns with values that may fit, or anything else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=5))
    return {name: draw(COLUMNS[name]) for name in names}
