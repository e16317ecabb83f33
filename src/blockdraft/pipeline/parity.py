"""`blockdraft parity`: trainer, reference engine and vLLM on the same prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.identity import TIE_CEILING, differences, tie_bound
from blockdraft.decoding.one_pass import example_proposals
from blockdraft.decoding.slot_gaps import SlotGaps
from blockdraft.errors import InputError
from blockdraft.ops.acceptance import AcceptanceCounts, Round
from blockdraft.pipeline.loading import Pair, encode_all, heldout_or_file, load_pair, verifier_for
from blockdraft.pipeline.serve import servable_verifier
from blockdraft.progress import progress, say, warn
from blockdraft.runtime import dtype_name, machine_description
from blockdraft.serving.client import EngineClient, Served
from blockdraft.serving.launcher import (
    engine_environment,
    needs_v1_runner,
    on_cpu,
    require_plugin,
    speculative_config,
)
from blockdraft.serving.offline import DETAILED, Decoded, Request, decode
from blockdraft.serving.parity import (
    STAGES,
    Finding,
    blocks_of,
    compare_counters,
    compare_reply,
    served_rounds,
    text_finding,
    within,
    without_padding,
)
from blockdraft.settings import ParitySettings, SamplingSettings, resolved
from blockdraft.vllm_plugin.record import Blocks, read
from blockdraft.vllm_plugin.servable import require_servable
from blockdraft.vllm_plugin.support import require_hidden_states

LONGEST_PROMPT = 2048  # tokens of the prompt that is made to be longer than a window


def parity(settings: ParitySettings) -> dict[str, Any]:
    """Compare; `failures` of the result is empty when what is served is what was trained."""
    conversations = heldout_or_file(settings.data_path, settings.workload, settings.max_prompts)
    pair = load_pair(settings)
    if not settings.endpoint:
        verifier = servable_verifier(pair.contract, settings.verifier_name_or_path)
        require_hidden_states(verifier, pair.contract.verifier.architecture, pair.contract.draft.target_layer_ids)
    prompts = encode_all(pair.verifier, conversations, pair.mode)
    ks, context = settings.k or (pair.contract.draft.num_speculative_tokens,), pair.verifier.context_length
    if settings.endpoint:
        served_k, longest = _ask_server(settings.endpoint, settings, prompts[0])
        ks, context = (served_k,), min(context, longest or context)
    for k in ks:
        pair.contract.require_k(k)
    prompts, unreached = past_windows(prompts, pair, settings.max_new_tokens, context)
    if unreached:
        warn(
            f"no text here goes past the window of {' and '.join(str(window) for window in unreached)} positions: "
            "give longer prompts (--data-path), or longer replies (--max-new-tokens)"
        )
    sampling = SamplingSettings(max_new_tokens=settings.max_new_tokens)
    engine = DecodingEngine(pair.verifier, None, 0, sampling)
    with progress("the verifier alone", len(prompts)) as advance:
        plain = engine.generate(prompts, settings.max_num_seqs, on_done=advance)
    exact = pair if pair.verifier.dtype == torch.float32 else load_pair(_in_float32(settings))
    stage = _Stage(settings, pair, exact, prompts, sampling, plain, tie_bound(exact.verifier, pair.verifier, plain))
    served = stage.served(ks)
    results = {str(k): stage.compare(k, decoded) for k, decoded in zip(ks, served, strict=True)}
    return {
        "checkpoint": str(settings.checkpoint),
        "method": pair.contract.draft.method,
        "dtype": dtype_name(pair.verifier.dtype),
        "prompts": len(prompts),
        "windows_not_passed": unreached,
        "reply_tokens": sum(len(reply.tokens) for reply in plain),
        "engine": settings.endpoint or "in process",
        "k": results,
        "mismatches": sum(result["mismatches"] for result in results.values()),
        "failures": [_first_line(k, result) for k, result in results.items() if result["mismatches"]],
        "machine": machine_description(pair.verifier.device),
        "settings": resolved(settings),
    }


def past_windows(
    prompts: list[list[int]], pair: Pair, max_new_tokens: int, context: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts, with one more that is longer than every window if none is: what a window hides shows behind it.

    The prompt of a model with an encoder is not what its windows slide over; its replies are.

    Args:
        context: positions that both engines hold.

    Returns:
        The prompts, and the windows that no text goes past.
    """
    config = pair.draft.config
    windows = sorted({window for window in (pair.verifier.window, *config.windows) if window is not None})
    if pair.verifier.has_encoder:
        return prompts, [window for window in windows if window >= max_new_tokens]
    room = min(LONGEST_PROMPT, context - max_new_tokens - 2 * config.block_size)
    within = [window for window in windows if window + config.block_size <= room]
    if within and max(len(prompt) for prompt in prompts) <= within[-1]:
        tokens = [token for prompt in prompts for token in prompt]
        length = within[-1] + config.block_size
        prompts = [*prompts, (tokens * (length // len(tokens) + 1))[:length]]
    longest = max(len(prompt) for prompt in prompts)
    return prompts, [window for window in windows if window >= longest]


def _ask_server(url: str, settings: ParitySettings, prompt: list[int]) -> tuple[int, int | None]:
    """The server's K, and how many positions it holds if it says so."""
    with EngineClient(url, settings.model) as client:
        k = client.num_speculative_tokens(prompt)
        if k is None:
            raise InputError("--endpoint", url, "it serves no draft, or not with --per-request-spec-decode-metrics")
        if settings.k and settings.k != (k,):
            raise InputError("--k", settings.k[0], f"the server proposes {k}; leave --k out")
        return k, client.max_model_len


def _first_line(k: str, result: dict[str, Any]) -> str:
    """The first mismatch of one K, in a line."""
    first = result["first_mismatch"]
    return (
        f"K={k}: prompt {first['prompt'] + 1}, {first['stage']} of the {first['engine']} engine at position "
        f"{first['position']}: {first['found']} where {first['wanted']} is right ({result['mismatches']} in all)"
    )


def _in_float32(settings: ParitySettings) -> ParitySettings:
    return dataclasses.replace(settings, dtype="float32")


@dataclass(frozen=True, slots=True)
class _Stage:
    """What comparisons for every K share."""

    settings: ParitySettings
    pair: Pair
    exact: Pair
    prompts: list[list[int]]
    sampling: SamplingSettings
    plain: list[Reply]
    bound: float

    def compare(self, k: int, served: Decoded) -> dict[str, Any]:
        """Reference engine and vLLM against the trainer's forward, with K = k."""
        engine = DecodingEngine(self.pair.verifier, self.pair.draft, k, self.sampling)
        with progress(f"reference engine, K={k}", len(self.prompts)) as advance:
            drafted = engine.generate(self.prompts, self.settings.max_num_seqs, on_done=advance)
        reference = [
            Served(str(reply.index), reply.tokens, [step.accepted or 0 for step in reply.rounds]) for reply in drafted
        ]
        own = [{step.anchor: list(step.tokens) for step in reply.rounds} for reply in drafted]
        findings = self._judge("reference", reference, own, k)
        findings += compare_counters(served.replies, served.counters, k)
        blocks, replies = None, served.replies
        if served.blocks:
            blocks = [blocks_of(reply, served.blocks) for reply in served.replies]
            replies = [
                without_padding(len(own.prompt), reply, each)
                for own, reply, each in zip(self.plain, served.replies, blocks, strict=True)
            ]
        findings += self._judge("vllm", replies, blocks, k)
        padding = sum(len(reply.accepted) for reply in served.replies) - sum(len(reply.accepted) for reply in replies)
        return self._result(findings, reference, dataclasses.replace(served, replies=replies), padding, k)

    def _judge(self, engine: str, replies: list[Served], blocks: list[Blocks] | None, k: int) -> list[Finding]:
        """An engine's replies against the verifier's own text and the trainer's forward."""
        texts = [
            Reply(own.index, own.prompt, own.limit, list(reply.tokens), source=own.source)
            for own, reply in zip(self.plain, replies, strict=True)
        ]
        found = differences(self.exact.verifier, self.plain, texts, self.bound)
        findings = [text_finding(engine, len(self.plain[each.prompt].prompt), each) for each in found]
        blockwise: list[Finding] = []
        bound = 0.0
        with progress(f"block by block, {engine}, K={k}", len(texts)) as advance:
            for text, reply in zip(texts, replies, strict=True):
                example = text.example(str(text.index))
                proposals = example_proposals(self.pair.verifier, self.pair.draft, example, k)
                gaps = SlotGaps(self.exact, self.pair, example, proposals) if self.bound else None
                bound = max(bound, gaps.bound if gaps else 0.0)
                blockwise += compare_reply(
                    engine,
                    text.index,
                    text.prompt,
                    reply,
                    proposals,
                    blocks[text.index] if blocks is not None else None,
                    gaps.gap if gaps else lambda *_: None,
                    TIE_CEILING if gaps else 0.0,
                )
                advance()
        return findings + [within(finding, bound) for finding in blockwise]

    def served(self, ks: Sequence[int]) -> list[Decoded]:
        """What vLLM makes of the prompts for every K."""
        settings = self.settings
        if settings.endpoint:
            return [self._from_server(settings.endpoint)]
        cpu = on_cpu()
        v1_runner = needs_v1_runner(self.pair.contract, cpu)
        require_plugin()
        require_servable(self.pair.contract, v1_runner)
        say(f"vLLM decodes with K={', '.join(str(k) for k in ks)}")
        requests = [self._request(k, v1_runner) for k in ks]
        return decode(requests, engine_environment(settings.threads, cpu, v1_runner))

    def _request(self, k: int, v1_runner: bool) -> Request:
        settings, contract = self.settings, self.pair.contract
        room = max(len(prompt) for prompt in self.prompts) + settings.max_new_tokens
        return Request(
            verifier=servable_verifier(contract, settings.verifier_name_or_path),
            prompts=self.prompts,
            stop_ids=sorted(self.pair.verifier.stop_ids),
            max_tokens=[settings.max_new_tokens] * len(self.prompts),
            dtype=dtype_name(self.pair.verifier.dtype),
            max_num_seqs=settings.max_num_seqs,
            # Blocks reach beyond the last token, and the engine stops drafting where its context ends.
            max_model_len=min(room + 2 * contract.draft.block_size, self.pair.verifier.context_length),
            speculative=speculative_config(settings.checkpoint.resolve(), contract, k, v1_runner),
            engine=DETAILED | self._origin() | ({} if settings.compile else {"enforce_eager": True}),
        )

    def _origin(self) -> dict[str, Any]:
        _, revision = verifier_for(self.pair.contract, self.settings.verifier_name_or_path, self.settings.revision)
        return {"revision": revision, "trust_remote_code": self.settings.trust_remote_code}

    def _from_server(self, url: str) -> Decoded:
        stop_ids = sorted(self.pair.verifier.stop_ids)
        with EngineClient(url, self.settings.model) as client:
            before = client.counters()
            with ThreadPoolExecutor(self.settings.max_num_seqs) as pool:
                futures = [
                    pool.submit(
                        client.complete, prompt, stop_ids, max_tokens=self.sampling.max_new_tokens, temperature=0
                    )
                    for prompt in self.prompts
                ]
                replies = [future.result() for future in futures]
            after = client.counters()
        counters = {name: after[name] - before[name] for name in after}
        return Decoded(replies, counters, read(self.settings.record) if self.settings.record else {})

    def _result(
        self, findings: list[Finding], reference: list[Served], served: Decoded, padding: int, k: int
    ) -> dict[str, Any]:
        """One K's part of the result; `padding` steps are in the engine's counters though nothing was proposed."""
        drafts = served.counters["drafts"] - padding
        mismatches = [finding for finding in findings if not finding.tie]
        return {
            "stages": {
                engine: {
                    stage: {
                        "ties": sum(f.engine == engine and f.stage == stage and f.tie for f in findings),
                        "mismatches": sum(f.engine == engine and f.stage == stage for f in mismatches),
                    }
                    for stage in STAGES
                }
                for engine in ("reference", "vllm")
            },
            "blocks": sum(len(reply.accepted) for reply in served.replies),
            "blocks_recorded": bool(served.blocks),
            "acceptance_length": {
                "reference": self._length(reference, k),
                "vllm": self._length(served.replies, k),
                "vllm_counters": 1 + served.counters["accepted"] / drafts if drafts else 1.0,
            },
            "padded_steps": padding,
            "mismatches": len(mismatches),
            "ties": len(findings) - len(mismatches),
            "first_mismatch": dataclasses.asdict(mismatches[0]) if mismatches else None,
        }

    def _length(self, replies: list[Served], k: int) -> float:
        """Acceptance length over what was delivered, as everywhere in blockdraft."""
        rounds = [
            Round(step.anchor, (0,) * k, step.delivered)
            for own, reply in zip(self.plain, replies, strict=True)
            for step in served_rounds(len(own.prompt), reply)
        ]
        return AcceptanceCounts.of(rounds, k).acceptance_length
