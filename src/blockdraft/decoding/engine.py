"""The reference engine: plain and speculative decoding of batches, greedy or sampled.

A round is: propose up to K tokens after the anchor, run the verifier over anchor and proposals at once, keep the
longest prefix the verifier agrees with plus its own next token. Proposing nothing (k = 0) is plain decoding, in the
same loop. Finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.decoding.proposals import Proposal, most_likely, propose
from blockdraft.decoding.stops import StopRules, StopWindow
from blockdraft.errors import InputError
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.acceptance import Round, accept_sampled, accepted_prefix
from blockdraft.ops.prefix import shared_prefix
from blockdraft.ops.ragged_kv import RaggedKV
from blockdraft.ops.sampling import sampling_probs
from blockdraft.records import Example
from blockdraft.settings import SamplingSettings
from blockdraft.verifiers.base import Verifier, VerifierCache


@dataclass(slots=True)
class Reply:
    """A reply, growing while it is decoded.

    Attributes:
        index: which prompt it answers.
        tokens: token ids of the reply, the end-of-turn id included if it came.
        rounds: what each round proposed and how much of it was delivered; empty in plain decoding.
        from_draft: for each token, whether it was proposed by the draft.
        finish: "stop" (end of turn or a stop string), "length", or None while it is running.
        source: what the verifier's encoder reads; None where it has none.
    """

    index: int
    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str | None = None
    source: list[int] | None = None
    _window: StopWindow = field(default_factory=StopWindow, repr=False, compare=False)

    def example(self, name: str) -> Example:
        """The text so far as an example."""
        return Example.of_reply(name, self.prompt, self.tokens, self.finish or "length", source_ids=self.source)

    def take(self, proposed: Sequence[int] | None, accepted: int, bonus: int, stops: StopRules) -> None:
        """Append the proposed tokens that the verifier accepted and its own, up to where the reply ends.

        `proposed` is None where there is no draft: that is no round. A draft may propose nothing in a round.
        """
        anchor = len(self.prompt) + len(self.tokens) - 1
        delivered = 0
        for from_draft, token in [*((True, token) for token in (proposed or ())[:accepted]), (False, bonus)]:
            self.tokens.append(token)
            self.from_draft.append(from_draft)
            delivered += from_draft
            self.finish = stops.reason(self.tokens, self.limit, self._window)
            if self.finish:
                break
        if proposed is not None:
            self.rounds.append(Round(anchor, tuple(proposed), delivered, accepted))


@dataclass(slots=True)
class _Batch:
    """Rows that decode together, with both caches in the same row order."""

    replies: list[Reply]
    verifier_cache: VerifierCache
    draft_cache: RaggedKV | None

    def keep_running(self) -> None:
        running = [row for row, reply in enumerate(self.replies) if not reply.finish]
        if len(running) == len(self.replies):
            return
        rows = torch.tensor(running, dtype=torch.int64, device=self.verifier_cache.kv.lengths.device)
        self.replies = [self.replies[row] for row in running]
        self.verifier_cache.keep_rows(rows)
        if self.draft_cache is not None:
            self.draft_cache.keep_rows(rows)


OnRound = Callable[[Reply], None]


class DecodingEngine:
    """Decodes prompts with a verifier and, unless `k` is 0, a draft.

    Args:
        k: tokens to propose a round at most; needs a draft when above 0.
        sampling: how tokens are chosen and when a reply ends; greedily, after 256 tokens at most, by default.
        confidence_threshold: end a proposal where the draft's confidence in it falls under this; 0 never does.

    Raises:
        InputError: a `k` without a draft, or one that its blocks have no slots for.
    """

    def __init__(
        self,
        verifier: Verifier,
        draft: BlockDraft | None,
        k: int,
        sampling: SamplingSettings | None = None,
        confidence_threshold: float = 0.0,
    ) -> None:
        most = 0 if draft is None else draft.config.num_speculative_tokens
        if not 0 <= k <= most:
            raise InputError("k", k, f"must be 0 to {most}; 0 decodes without a draft, and more needs one")
        sampling = sampling or SamplingSettings()
        self.verifier = verifier
        self.draft = draft if k else None
        self.k = k
        self.sampling = sampling
        self.confidence_threshold = confidence_threshold
        self.target_layer_ids = self.draft.config.target_layer_ids if self.draft is not None else ()
        self.stops = StopRules(
            frozenset() if sampling.ignore_eos else verifier.stop_ids,
            sampling.stop,
            lambda tokens: verifier.tokenizer.decode(tokens),
        )
        self._generator = torch.Generator(verifier.device).manual_seed(sampling.seed)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        batch_size: int = 16,
        on_round: OnRound | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Reply]:
        """Decode every prompt (token ids), `batch_size` at a time, longest first; replies come in prompt order.

        Args:
            on_round: called with each reply after each of its rounds.
            on_done: called with the number of replies that have just ended.

        Raises:
            InputError: a prompt is empty, leaves no room in the verifier's context, or cannot be read by its encoder.
        """
        replies = [self._reply(index, list(prompt)) for index, prompt in enumerate(prompts)]
        order = sorted(range(len(replies)), key=lambda index: (-len(prompts[index]), index))
        for first in range(0, len(order), batch_size):
            self._run([replies[index] for index in order[first : first + batch_size]], on_round, on_done)
        return replies

    def _reply(self, index: int, prompt: list[int]) -> Reply:
        sides = self.verifier.sides(prompt, f"prompt {index + 1}")
        room = self.verifier.context_length - len(sides.decoder)
        return Reply(index, sides.decoder, min(self.sampling.max_new_tokens, room), source=sides.encoder)

    @torch.inference_mode()
    def _run(self, replies: list[Reply], on_round: OnRound | None, on_done: Callable[[int], None] | None) -> None:
        batch = self._prefill(replies)
        running = len(replies)
        while True:
            for reply in batch.replies if on_round else ():
                on_round(reply)  # type: ignore[misc]
            batch.keep_running()
            if on_done and len(batch.replies) < running:
                on_done(running - len(batch.replies))
                running = len(batch.replies)
            if not batch.replies:
                return
            self._round(batch)

    def _prefill(self, replies: list[Reply]) -> _Batch:
        device = self.verifier.device
        prompts = [torch.tensor(reply.prompt, device=device) for reply in replies]
        shared = shared_prefix(prompts)
        cache = self.verifier.cache(1 if shared else len(replies), [reply.source for reply in replies])
        draft_cache = self.draft.cache(1 if shared else len(replies)) if self.draft is not None else None
        batch = _Batch(replies, cache, draft_cache)
        if shared:
            self._append(batch, prompts[0][None, :shared], torch.tensor([shared], device=device))
            copies = torch.zeros(len(replies), dtype=torch.int64, device=device)
            cache.keep_rows(copies)
            if draft_cache is not None:
                draft_cache.keep_rows(copies)
        rest = [prompt[shared:] for prompt in prompts]
        widths = torch.tensor([len(tokens) for tokens in rest], device=device)
        final = self._append(batch, torch.nn.utils.rnn.pad_sequence(rest, batch_first=True), widths)
        last = final[torch.arange(len(replies), device=device), widths - 1]
        for reply, token in zip(replies, self._next(self.verifier.logits(last)).tolist(), strict=True):
            reply.take(None, 0, token, self.stops)
        return batch

    def _append(self, batch: _Batch, tokens_RW: Tensor, counts_R: Tensor) -> Tensor:
        """Run known tokens, commit the first `counts_R` of each row; returns final states [R, W, E]."""
        states = self.verifier.extend(batch.verifier_cache, tokens_RW, self.target_layer_ids)
        self._commit(batch, states.taps, counts_R)
        return states.final

    def _commit(self, batch: _Batch, taps: Tensor, counts_R: Tensor) -> None:
        batch.verifier_cache.kv.commit(counts_R)
        if self.draft is not None and batch.draft_cache is not None:
            self.draft.extend_context(batch.draft_cache, taps.to(self.draft.norm.weight.dtype))
            batch.draft_cache.commit(counts_R)

    def _next(self, logits: Tensor) -> Tensor:
        """One token for each row of logits [..., V]."""
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1)
        probs = self._probs(logits)
        drawn = torch.multinomial(probs.flatten(0, -2), 1, generator=self._generator)
        return drawn.view(probs.shape[:-1])

    def _probs(self, logits: Tensor) -> Tensor:
        return sampling_probs(logits, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)

    def _round(self, batch: _Batch) -> None:
        anchors_R = torch.tensor([reply.tokens[-1] for reply in batch.replies], device=self.verifier.device)
        proposal = self._propose(batch, anchors_R)
        proposed_RK = anchors_R.new_empty(len(anchors_R), 0) if proposal is None else proposal.tokens
        tokens_RX = torch.cat([anchors_R[:, None], proposed_RK], dim=1)
        states = self.verifier.extend(batch.verifier_cache, tokens_RX, self.target_layer_ids)
        logits_RXV = self.verifier.logits(states.final)
        if self.sampling.temperature == 0:
            wanted_RX = logits_RXV.argmax(dim=-1)
            accepted_R = accepted_prefix(proposed_RK, wanted_RX[:, :-1])
            if proposal is not None:
                accepted_R = torch.minimum(accepted_R, proposal.lengths)
            bonus_R = wanted_RX.gather(1, accepted_R[:, None])[:, 0]
        elif proposal is None:
            accepted_R, bonus_R = torch.zeros_like(anchors_R), self._next(logits_RXV[:, 0])
        else:
            outcome = accept_sampled(
                proposed_RK, self._draft_probs(proposal), self._probs(logits_RXV), self._generator, proposal.lengths
            )
            accepted_R, bonus_R = outcome.accepted, outcome.bonus
        self._commit(batch, states.taps, accepted_R + 1)
        blocks: list[list[int] | None] = [None] * len(anchors_R)
        if proposal is not None:
            lengths = proposal.lengths.tolist()
            blocks = [tokens[:length] for tokens, length in zip(proposed_RK.tolist(), lengths, strict=True)]
        for reply, block, accepted, bonus in zip(
            batch.replies, blocks, accepted_R.tolist(), bonus_R.tolist(), strict=True
        ):
            reply.take(block, accepted, bonus, self.stops)

    def _draft_probs(self, proposal: Proposal) -> Tensor | None:
        """What the proposed tokens were drawn from, over the verifier's vocabulary, [R, W, V]; None if not drawn."""
        assert self.draft is not None
        if self.sampling.draft_sample_method == "greedy":
            return None
        probs = self._probs(proposal.logits)
        return probs if self.draft.vocabulary is None else self.draft.vocabulary.expand(probs)

    def _propose(self, batch: _Batch, anchors_R: Tensor) -> Proposal | None:
        """Up to K tokens for each row; None without a draft."""
        if self.draft is None or batch.draft_cache is None:
            return None
        hidden = self.draft.block_hidden(batch.draft_cache, anchors_R, self.draft.slots_for(self.k))
        choose = most_likely if self.sampling.draft_sample_method == "greedy" else self._next
        return propose(self.draft, self.draft.predicted(hidden), anchors_R, choose, self.confidence_threshold)
