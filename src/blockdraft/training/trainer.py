"""The training loop.

One row of packed examples is one forward pass; `grad_accum` rows in each process are one update, whose loss is that of
all its rows as one: the sum over their slots divided by the number of them. The last update takes the rows that are
left. Losses, metrics and gradients are summed over the processes once an update; the first process alone writes.

A run has three phases. `TrainingPlan` checks all that can be checked, `Trainer.prepare` makes hidden states and the
draft or takes up an earlier run's, and `Trainer.run` trains and writes what came of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import torch

from blockdraft.decoding.one_pass import rounds_of_example
from blockdraft.durations import seconds_of
from blockdraft.errors import BlockdraftError, InputError, StoppedError
from blockdraft.files import reason
from blockdraft.losses.metrics import BlockMetrics
from blockdraft.models.block_draft import BlockDraft
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.progress import progress, say, warn
from blockdraft.training.background import background_writer
from blockdraft.training.creation import create_draft
from blockdraft.training.history import Progress, Validation
from blockdraft.training.loggers import LogWindow, NoLogger, Update, make_logger
from blockdraft.training.optimizers import Optimizers
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.processes import whole
from blockdraft.training.resume import ResumeState
from blockdraft.training.run_folder import BEST, RunFolder
from blockdraft.training.schedules import learning_rate_factor
from blockdraft.training.sharding import load_whole, shard, whole_draft, whole_state
from blockdraft.training.step import positions_before, row_loss
from blockdraft.training.stopping import stop_requested


class Trainer:
    """A draft in training. Made by `prepare`, which resumes, or by `fresh`, for updates outside of a run.

    Attributes:
        progress: how much of the plan is done.
    """

    def __init__(self, folder: RunFolder, draft: BlockDraft) -> None:
        self.folder, self.plan, self.draft = folder, folder.plan, draft
        self.processes = self.plan.processes
        self.optimizers = Optimizers(draft, self.plan.settings, self.processes)
        self.progress = Progress(rows_per_step=self.plan.rows_per_step)

    @classmethod
    def prepare(cls, plan: TrainingPlan) -> Trainer:
        """Make hidden states and the draft, and take up an earlier run's state if there is one.

        Raises:
            InputError: the folder holds a run with other settings, or one whose states are all damaged.
        """
        folder = RunFolder(plan)
        with plan.processes.first_before_others():
            state = folder.enter()
        trainer = cls(folder, _fresh_draft(plan))
        folder.write_record()
        if state is not None:
            trainer._take_up(state)
            say(f"resuming after step {trainer.progress.step} of {plan.total_steps}")
        return trainer

    @classmethod
    def fresh(cls, plan: TrainingPlan) -> Trainer:
        """Make hidden states and the draft, whatever the run's folder holds."""
        return cls(RunFolder(plan), _fresh_draft(plan))

    def _take_up(self, state: ResumeState) -> None:
        try:
            load_whole(self.draft, state.draft)
            self.optimizers.load_state_dict(state.optimizers)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:  # whole, but of another version's draft
            raise InputError(
                "--save-path", self.folder.path, f"its training states do not fit the draft ({reason(error)}); "
                "start again with --restart",
            ) from None  # fmt: skip
        self.progress = state.progress
        now, before = self.plan.rows_per_step, state.progress.rows_per_step or self.plan.rows_per_step
        if now != before:
            self.progress.step = self.progress.step * before // now
            self.progress.rows_per_step = now
            warn(
                f"the run had {before} rows a step and has {now} now, in {self.processes.count} processes: it goes on "
                f"after step {self.progress.step} of {self.plan.total_steps}, and not to the same bits"
            )

    def seconds_per_step(self, num_steps: int = 4) -> float:
        """Time updates, to plan how many fit into a given time. They spoil the draft: make a new trainer to train."""
        self._update(0, factor=0.0)  # the first one allocates
        start = time.monotonic()
        for step in range(num_steps):
            self._update(step % self.plan.total_steps, factor=0.0)
        return (time.monotonic() - start) / num_steps

    def run(self, started: float | None = None) -> dict[str, Any]:
        """Train to the end, or up to a signal or the time limit; returns the summary, also written to `summary.json`.

        Args:
            started: `time.monotonic()` when the time limit began to run; default: now.

        Raises:
            StoppedError: stopped before the end; the state is saved and the next run goes on from it.
            BlockdraftError: a loss, gradient or weight is not finite, or the disk is full; the states before are kept.
        """
        plan, settings, total = self.plan, self.plan.settings, self.plan.total_steps
        logger = make_logger(settings.logger, plan.log_folder) if self.processes.first else NoLogger()
        window = LogWindow()
        every = max(1, round(settings.checkpoint_freq * plan.steps_per_epoch))
        limit = seconds_of(settings.time_limit) if settings.time_limit else None
        deadline = None if limit is None else (time.monotonic() if started is None else started) + limit
        with (
            stop_requested(deadline) as stop, background_writer() as writer,
            progress("training", total, self.progress.step) as advance,
        ):  # fmt: skip
            texts = f"{len(plan.train)} documents, {len(plan.validation)} for validation"
            say(f"training: {total} steps, {texts}")  # from here on, a signal stops after a step
            while self.progress.step < total:
                factor = self._factor(self.progress.step)
                window.add(self._next_update(factor))
                step = self.progress.step
                finished, stopping = step == total, self.processes.any(stop())
                writer.raise_failure()
                if step % settings.log_freq == 0 or finished:
                    figures = window.taken()
                    logger.log({f"train/{k}": v for k, v in figures.items()} | {"train/lr_factor": factor}, step)
                    advance(0, f"loss {figures['loss']:.3f}, block length {figures['block_length']:.2f}")
                advance()
                validates = step % every == 0 or finished
                if validates:
                    logger.log({f"validation/{k}": v for k, v in self._validate().items()}, step)
                if validates or stopping:
                    state = self._state()
                    if self.processes.first:
                        writer.submit(functools.partial(self.folder.resume_states.save, state))
                if stopping and not finished:
                    writer.wait()
                    self.processes.wait()  # whoever ends first has the others ended, too
                    logger.close()
                    command = "the same command" + (" without --restart" if settings.restart else "")
                    raise StoppedError(f"stopped after step {step}; {command} goes on from there")
        logger.close()
        summary = self.folder.finish(whole_draft(self.draft), self.progress)
        self.processes.wait()
        return summary

    def _factor(self, step: int) -> float:
        settings = self.plan.settings
        return learning_rate_factor(
            step, self.plan.total_steps, settings.scheduler_warmup_ratio, settings.scheduler_type
        )

    def _next_update(self, factor: float) -> Update:
        """The update that is due, timed and counted."""
        start, waited = time.monotonic(), self.plan.states.waited
        update = self._update(self.progress.step, factor)
        took = time.monotonic() - start
        self.progress.seconds += took
        self.progress.step += 1
        return dataclasses.replace(update, seconds=took, waited=self.plan.states.waited - waited)

    def _update(self, step: int, factor: float) -> Update:
        loss, metrics = self._gradients(step)
        limit = self.plan.settings.max_grad_norm or math.inf
        norm = whole(torch.nn.utils.clip_grad_norm_(list(self.draft.parameters()), limit))
        if not (math.isfinite(loss) and bool(norm.isfinite())):
            self._refuse_nan(step)
        self.optimizers.step(factor)
        tokens = sum(len(self.plan.train[i].input_ids) for row in self.plan.rows_of(step) for i in self.plan.rows[row])
        return Update(loss, metrics, float(norm), tokens)

    def _gradients(self, step: int) -> tuple[float, BlockMetrics]:
        """Add up the gradients of a step's rows, as if they were one row; returns its loss and metrics."""
        plan, verifier = self.plan, self.plan.verifier
        # Anchors of all rows first: what the step is divided by is known before the first backward pass.
        rows = [plan.draw(number) for number in plan.share_of(step)]
        plan.states.expect(plan.rows_after(step))
        k = plan.config.num_speculative_tokens
        supervised = self.processes.summed(sum(int(positions_before(row.blocks, k)[1].sum()) for row in rows))
        objective = plan.objective.at(step / plan.total_steps)
        total, metrics = 0.0, BlockMetrics.none(k, self.draft.confidence is not None).to(verifier.device)
        for row in rows:
            states = plan.states.get(row.indices, noise_std=plan.settings.noise_std, generator=row.generator)
            with self._autocast():
                outcome = row_loss(
                    self.draft, row.packed, states, row.blocks, objective, verifier.logit_softcap, supervised,
                    verifier.head_VE,
                )  # fmt: skip
            outcome.loss.backward()
            total += float(outcome.loss.detach())
            metrics = metrics + outcome.metrics
        if plan.settings.fsdp_shard:
            self._keep_in_step(step, len(rows))
        else:
            self.processes.sum_gradients(self.draft.parameters())
        return self.processes.summed((total, metrics))

    def _keep_in_step(self, step: int, done: int) -> None:
        """Run as many passes as the first process, which has the most rows: they gather a divided draft together.

        Their gradients are nothing.
        """
        plan = self.plan
        for _ in range(done, len(plan.rows_of(step)[:: self.processes.count])):
            row = plan.draw(plan.rows_of(step)[0])
            with self._autocast():
                outcome = row_loss(
                    self.draft, row.packed, plan.states.get(row.indices), row.blocks,
                    plan.objective.at(step / plan.total_steps), plan.verifier.logit_softcap,
                    whole_head_VE=plan.verifier.head_VE,
                )  # fmt: skip
            (outcome.loss * 0.0).backward()

    def _autocast(self) -> Any:
        verifier = self.plan.verifier
        return torch.autocast(verifier.device.type, torch.bfloat16, enabled=verifier.dtype == torch.bfloat16)

    def _refuse_nan(self, step: int) -> None:
        parameters = {name: (whole(p.detach()), p.grad) for name, p in self.draft.named_parameters()}
        weights = [name for name, (weight, _) in parameters.items() if not bool(weight.isfinite().all())]
        gradients = [n for n, (_, g) in parameters.items() if g is not None and not bool(whole(g).isfinite().all())]
        what = f"the weight {', '.join(weights[:3])}" if weights else ""
        what = what or (f"the gradient of {', '.join(gradients[:3])}" if gradients else "the loss")
        plan = self.plan
        names = [plan.train[example].id for number in plan.rows_of(step) for example in plan.rows[number]]
        raise BlockdraftError(
            f"step {step + 1}: {what} is not finite; rows {', '.join(map(str, plan.rows_of(step)))}, "
            f"examples {names[:8]}; the state before it is kept: lower --lr or --muon-lr, or look at these examples"
        )

    def _validate(self) -> dict[str, float]:
        """Exact acceptance on the validation examples; the best so far becomes the best checkpoint."""
        plan, k = self.plan, self.plan.contract.draft.num_speculative_tokens
        rounds, draft = [], whole_draft(self.draft)
        with torch.inference_mode(), self._autocast():
            for place, index in enumerate(plan.own_validation):
                plan.states.expect([later] for later in plan.own_validation[place:])
                (states,) = plan.states.get([index])
                rounds += rounds_of_example(draft, plan.examples[index], states.taps, [k])[k]
        counts = self.processes.summed(AcceptanceCounts.of(rounds, k))
        figures = {"acceptance_length": counts.acceptance_length, "acceptance_rate": counts.acceptance_rate}
        self.progress.history += (Validation(self.progress.step, self.progress.seconds, **figures),)
        if counts.acceptance_length > self.progress.best_length:
            self.progress.best_length = counts.acceptance_length
            self.folder.save_checkpoint(BEST, draft, self.progress)
        return figures

    def _state(self) -> ResumeState:
        return ResumeState.copied(whole_state(self.draft.state_dict()), self.optimizers.state_dict(), self.progress)


def _fresh_draft(plan: TrainingPlan) -> BlockDraft:
    """Make hidden states, and a draft that is calibrated on them."""
    processes = plan.processes
    with processes.first_before_others():
        plan.states.prepare()
    plan.states.fill(plan.own_examples if processes.count > 1 else None)
    draft = create_draft(plan.config, plan.verifier, plan.states, plan.settings.seed, plan.vocabulary)
    if plan.parent is not None:
        plan.parent.fill(draft)
    compiled = plan.settings.compile
    if compiled == "on" or (compiled == "auto" and plan.verifier.device.type == "cuda"):
        draft.compile_layers()
    processes.take_over(draft)
    if plan.settings.fsdp_shard:
        shard(draft, processes)
    return draft
