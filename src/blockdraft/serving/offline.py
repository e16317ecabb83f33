"""vLLM without a server: batches of prompts through engines in a process of their own.

`decode` starts this module as a child, gives it requests as JSON on stdin and reads the answers from files. A
process of its own, since the engine reads its environment when it is imported and does not give its memory back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.errors import BlockdraftError
from blockdraft.progress import warn
from blockdraft.serving.client import COUNTERS, Served
from blockdraft.serving.engine_log import cause
from blockdraft.vllm_plugin.record import RECORD_PATH, Blocks, read

LOG_LINES = 15
DETAILED = {"per_request_spec_decode_metrics": "detailed"}


@dataclass(frozen=True, slots=True)
class Request:
    """What to decode, and how.

    Attributes:
        verifier: a model's folder or name; a draft's folder lets the engine find out both by itself.
        max_tokens: longest reply, by prompt.
        speculative: vLLM's speculative config; None leaves it to the engine.
        engine: further arguments of vLLM's engine (with a draft, `DETAILED` for the count of every round).
        sampling: further sampling parameters of vLLM.
    """

    verifier: str
    prompts: list[list[int]]
    stop_ids: list[int]
    max_tokens: list[int]
    dtype: str
    max_num_seqs: int
    max_model_len: int
    speculative: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Replies in the order of the prompts, the engine's counters, and the proposed blocks by request."""

    replies: list[Served]
    counters: dict[str, int]
    blocks: dict[str, Blocks]


def decode(requests: Sequence[Request], environment: dict[str, str]) -> list[Decoded]:
    """Run requests one after the other, each with an engine of its own, in one child process.

    Args:
        environment: variables added to this process's own (`launcher.engine_environment`).

    Raises:
        BlockdraftError: the engine failed; its cause is in the message, the end of what it said goes to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        done = subprocess.run(
            [sys.executable, "-m", "blockdraft.serving.offline", folder],
            input=json.dumps([asdict(request) for request in requests]),
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        answers = [_answer_path(folder, index) for index in range(len(requests))]
        if done.returncode or not all(answer.is_file() for answer in answers):
            lines = (done.stdout + "\n" + done.stderr).strip().splitlines()
            warn("\n".join(lines[-LOG_LINES:]))
            raise BlockdraftError(f"vLLM failed: {cause(lines, done.returncode)}")
        results = []
        for index, answer in enumerate(answers):
            found = json.loads(answer.read_text(encoding="utf-8"))
            replies = [Served(**reply) for reply in found["replies"]]
            results.append(Decoded(replies, found["counters"], read(_record_path(folder, index))))
        return results


def _answer_path(folder: str, index: int) -> Path:
    return Path(folder) / f"answer-{index}.json"


def _record_path(folder: str, index: int) -> Path:
    return Path(folder) / f"blocks-{index}.jsonl"


def main() -> None:
    """The child."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for index, request in enumerate(json.loads(sys.stdin.read())):
        os.environ[RECORD_PATH] = str(_record_path(sys.argv[1], index))
        answer = _run(Request(**request))
        _answer_path(sys.argv[1], index).write_text(json.dumps(answer), encoding="utf-8")
        cleanup_dist_env_and_memory()


def _run(request: Request) -> dict[str, Any]:
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=request.verifier,
        dtype=request.dtype,
        max_num_seqs=request.max_num_seqs,
        max_model_len=request.max_model_len,
        speculative_config=request.speculative,
        disable_log_stats=False,
        **request.engine,
    )
    before = _counters(engine)
    sampling = {"temperature": 0.0, "stop_token_ids": request.stop_ids, **request.sampling}
    parameters = [SamplingParams(max_tokens=limit, **sampling) for limit in request.max_tokens]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request.prompts]
    replies = []
    for output in engine.generate(prompts, parameters, use_tqdm=False):
        reply = output.outputs[0]
        steps = reply.spec_decode_metrics
        accepted = list(steps.per_step_accepted) if steps is not None else []
        replies.append({"request": output.request_id, "tokens": list(reply.token_ids), "accepted": accepted})
    after = _counters(engine)
    return {"replies": replies, "counters": {name: after[name] - before[name] for name in after}}


def _counters(engine: Any) -> dict[str, int]:
    # The engine reports counters without the suffix that Prometheus adds.
    totals = {metric.name: int(metric.value) for metric in engine.get_metrics() if hasattr(metric, "value")}
    return {name: totals.get(metric.removesuffix("_total"), 0) for name, metric in COUNTERS.items()}


if __name__ == "__main__":
    main()
