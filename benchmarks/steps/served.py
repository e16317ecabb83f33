"""A worker: seconds of vLLM's drafting step (one call of its proposer, batch 1) for a checkpoint.

`python served.py CHECKPOINT DTYPE` prints {"median": seconds, "calls": n} as its last line. The first calls, in which
memory is allocated, and those of prefills are left out.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from blockdraft.checkpoints.store import read_contract
from blockdraft.pipeline.loading import trained_dtype
from blockdraft.pipeline.serve import servable_verifier
from blockdraft.runtime import dtype_name
from blockdraft.serving.launcher import engine_environment, on_cpu

PROMPT, REPLY, LEFT_OUT = 48, 160, 8


def main() -> None:
    checkpoint, dtype = Path(sys.argv[1]).resolve(), sys.argv[2]
    cpu = on_cpu()
    os.environ.update(engine_environment(0, cpu, v1_runner=True))
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.plugins import load_general_plugins
    from vllm.v1.spec_decode.dflash import DFlashProposer

    load_general_plugins()
    stock, seconds = DFlashProposer.propose, []

    def timed(proposer: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        drafted = stock(proposer, *args, **kwargs)
        drafted.tolist()  # on an accelerator: wait for it
        seconds.append(time.perf_counter() - start)
        return drafted

    DFlashProposer.propose = timed
    contract = read_contract(checkpoint)
    speculative = {
        "model": str(checkpoint),
        "method": "dflash",
        "num_speculative_tokens": contract.draft.num_speculative_tokens,
    }
    engine = LLM(
        model=servable_verifier(contract, None),
        dtype=dtype_name(trained_dtype(dtype, contract)),
        max_num_seqs=1,
        max_model_len=512,
        speculative_config=speculative,
        enforce_eager=True,
    )
    prompt = TokensPrompt(prompt_token_ids=list(range(100, 100 + PROMPT)))
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True), use_tqdm=False)
    kept = seconds[LEFT_OUT:]
    print(json.dumps({"median": statistics.median(kept), "calls": len(kept)}))


if __name__ == "__main__":
    main()
