"""The words a setting can take, each list once: types, help, checks and errors are made from these."""

from __future__ import annotations

from typing import Any, Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16"]
ContextFusion = Literal["projected", "layerwise"]
ContextKV = Literal["shared", "separate"]
SequentialHead = Literal["none", "markov", "gated", "rnn"]
ConfidenceHead = Literal["none", "linear"]
Weighting = Literal["dpace", "fixed-exp-decay", "progressive-decay"]
Optimizer = Literal["muon", "adamw"]
Schedule = Literal["cosine", "linear", "constant"]
Logger = Literal["tensorboard", "none"]
Switch = Literal["auto", "on", "off"]
Thinking = Literal["trained", "auto", "on", "off"]
OnMissing = Literal["generate", "skip", "warn", "raise"]
OnGenerate = Literal["cache", "delete"]
RewrittenHistory = Literal["last", "split", "reject"]
Overlong = Literal["truncate", "drop"]
Engine = Literal["reference", "vllm"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
Workload = Literal["records", "chat"]


def words(choice: Any) -> tuple[str, ...]:
    """The words of one of the types above."""
    return get_args(choice)
