"""How proposals are chosen at a temperature above 0: accepted tokens a round when they are most likely, or drawn.

python benchmarks/sampling.py DRAFT [--max-prompts 8] [--max-new-tokens 64]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from blockdraft.choices import DraftSampleMethod, words
from blockdraft.data.workloads import workload_prompts
from blockdraft.decoding.engine import DecodingEngine
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.pipeline.loading import encode_all, load_pair
from blockdraft.runtime import machine_description
from blockdraft.settings import CheckpointSettings, SamplingSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--max-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    pair = load_pair(CheckpointSettings(checkpoint=arguments.draft))
    k = pair.draft.config.num_speculative_tokens
    prompts = encode_all(pair.verifier, workload_prompts("records")[1][: arguments.max_prompts], pair.mode)
    for temperature in (0.5, 0.7, 1.0):
        sampling = SamplingSettings(max_new_tokens=arguments.max_new_tokens, temperature=temperature)
        lengths = {}
        for method in words(DraftSampleMethod):
            chosen = dataclasses.replace(sampling, draft_sample_method=method)
            replies = DecodingEngine(pair.verifier, pair.draft, k, chosen).generate(prompts, arguments.max_prompts)
            counts = AcceptanceCounts.of([r for reply in replies for r in reply.rounds], k)
            lengths[method] = round(counts.acceptance_length, 2)
        print(
            json.dumps({"draft": arguments.draft.parent.name, "k": k, "temperature": temperature, **lengths}),
            flush=True,
        )
    print(machine_description(pair.verifier.device))


if __name__ == "__main__":
    main()
