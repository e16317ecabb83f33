"""vLLM without a server: one batch of prompts through an engine in a process of its own.

`decode` starts this module as a child, gives it a request as JSON on stdin and reads the answer from a file. A
process of its own, since the engine reads its environment when it is imported and does not give its memory back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.errors import BlockdraftError
from blockdraft.serving.client import COUNTERS, Served
from blockdraft.serving.record import RECORD_PATH, Blocks, read

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


def decode(request: Request, environment: dict[str, str]) -> Decoded:
    """Run a request in a child process.

    Args:
        environment: variables added to this process's own (`launcher.engine_environment`).

    Raises:
        BlockdraftError: the engine failed; the end of what it said is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, record = Path(folder) / "answer.json", Path(folder) / "blocks.jsonl"
        variables = {**os.environ, **environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", RECORD_PATH: str(record)}
        command = [sys.executable, "-m", "blockdraft.serving.offline", str(answer)]
        done = subprocess.run(
            command, input=json.dumps(asdict(request)), env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode or not answer.is_file():
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_LINES:])
            raise BlockdraftError(f"vLLM failed with exit code {done.returncode}:\n{said}")
        found = json.loads(answer.read_text(encoding="utf-8"))
        return Decoded([Served(**reply) for reply in found["replies"]], found["counters"], read(record))


def main() -> None:
    """The child."""
    from vllm import LLM, SamplingParams, TokensPrompt

    request = Request(**json.loads(sys.stdin.read()))
    engine = LLM(
        model=request.verifier,
        dtype=request.dtype,
        max_num_seqs=request.max_num_seqs,
        max_model_len=request.max_model_len,
        speculative_config=request.speculative,
        disable_log_stats=False,
        **request.engine,
    )
    sampling = {"temperature": 0.0, "stop_token_ids": request.stop_ids, **request.sampling}
    parameters = [SamplingParams(max_tokens=limit, **sampling) for limit in request.max_tokens]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request.prompts]
    replies = []
    for output in engine.generate(prompts, parameters, use_tqdm=False):
        reply = output.outputs[0]
        steps = reply.spec_decode_metrics
        agreed = list(steps.per_step_accepted) if steps is not None else []
        replies.append({"request": output.request_id, "tokens": list(reply.token_ids), "agreed": agreed})
    # The engine reports counters without the suffix that Prometheus adds.
    totals = {metric.name: int(metric.value) for metric in engine.get_metrics() if hasattr(metric, "value")}
    counters = {name: totals.get(metric.removesuffix("_total"), 0) for name, metric in COUNTERS.items()}
    Path(sys.argv[1]).write_text(json.dumps({"replies": replies, "counters": counters}), encoding="utf-8")


if __name__ == "__main__":
    main()
