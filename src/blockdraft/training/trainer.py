"""The training loop.

One row of packed examples is one forward pass; `grad_accum` rows are one update, whose loss is that of all its rows
as one: the sum over their slots divided by the number of them. The last update takes the rows that are left. Which
examples a row holds and which anchors are drawn follow from the seed and the step alone, so that a run that was killed
and resumed computes the same bits as one that was not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from blockdraft.checkpoints.store import save_draft
from blockdraft.contract import Contract
from blockdraft.data.packing import PackedRow, pack_row, packed_order
from blockdraft.data.templates import ChatMode
from blockdraft.decoding.one_pass import rounds_of_example
from blockdraft.digests import already_made
from blockdraft.errors import BlockdraftError, InputError
from blockdraft.files import reason, write_json, writing
from blockdraft.losses.metrics import BlockMetrics
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.ops.anchors import Blocks, choose_anchors
from blockdraft.progress import progress, say
from blockdraft.records import Example, examples_digest
from blockdraft.runtime import resolve_dtype
from blockdraft.settings import TRAIN_DATA_RATIO, TrainSettings, identity, resolved
from blockdraft.training.creation import (
    create_draft,
    draft_config,
    draft_vocabulary,
    make_contract,
    make_objective,
)
from blockdraft.training.hidden_state_files import HiddenStateFiles
from blockdraft.training.hidden_states import HiddenStateProvider, InProcess, TrainingStates
from blockdraft.training.history import SUMMARY, Progress, Summary, Validation, read_summary, write_summary
from blockdraft.training.loggers import log_folder, make_logger
from blockdraft.training.optimizers import Optimizers
from blockdraft.training.provenance import provenance
from blockdraft.training.resume import ResumeState, ResumeStates
from blockdraft.training.schedules import learning_rate_factor
from blockdraft.training.split import joined, split_examples
from blockdraft.training.step import positions_before, row_loss
from blockdraft.verifiers.base import Verifier

BEST, LAST, STATES = "checkpoint_best", "checkpoint_last", "states"
RECORD = "settings.json"


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a step, with its anchors drawn."""

    indices: list[int]
    packed: PackedRow
    blocks: Blocks
    generator: torch.Generator


class Trainer:
    """Trains one draft. Building it checks everything that can be checked; `run` does the work.

    `states` may be those of another trainer with the same data, split and taps, so that they are made once. `mode` is
    what the chat template was told when the data were made; it goes with the checkpoint.
    """

    def __init__(
        self,
        settings: TrainSettings,
        verifier: Verifier,
        examples: Sequence[Example],
        states: TrainingStates | None = None,
        mode: ChatMode | None = None,
    ) -> None:
        self.settings, self.verifier, self.mode = settings, verifier, mode or ChatMode()
        self._logs = log_folder(settings)
        self.objective = make_objective(settings, settings.speculator_type)
        self.config = draft_config(settings, verifier, examples)
        provider = states.provider if states else self._provider()
        examples = provider.available(examples)
        self.train, self.validation = split_examples(examples, settings.train_data_ratio or TRAIN_DATA_RATIO)
        self.vocabulary = draft_vocabulary(self.config, self.train)
        self.contract: Contract = make_contract(self.config, verifier, self.vocabulary)
        self.rows = self._planned_rows()
        self.total_steps = math.ceil(len(self.rows) / settings.grad_accum)
        self.progress = Progress()
        self._saved = ResumeStates(settings.save_path / STATES)
        self.states = states or TrainingStates(provider, self.examples, settings.states_memory_gib)

    def _provider(self) -> HiddenStateProvider:
        """Where hidden states come from."""
        settings = self.settings
        maker = InProcess(self.verifier, self.config.target_layer_ids, self.objective.needs_teacher)
        if settings.hidden_states_path is None:
            return maker
        return HiddenStateFiles(settings.hidden_states_path, maker, settings.on_missing, settings.on_generate)

    @property
    def examples(self) -> Sequence[Example]:
        """Those that train, and behind them those that validate."""
        return joined(self.train, self.validation)

    def _planned_rows(self) -> list[list[int]]:
        """Example indices of every row of the whole run, in order."""
        settings = self.settings
        lengths = [len(example.input_ids) for example in self.train]
        rows: list[list[int]] = []
        for epoch in range(math.ceil(settings.epochs)):
            epoch_rows = packed_order(lengths, settings.total_seq_len, settings.seed, epoch)
            share = min(1.0, settings.epochs - epoch)
            rows.extend(epoch_rows[: max(1, round(share * len(epoch_rows)))])
        return rows

    @property
    def steps_per_epoch(self) -> float:
        return self.total_steps / self.settings.epochs

    def facts(self) -> dict[str, Any]:
        """Everything that determines the trained weights."""
        # Where data and verifier lie does not matter; what they are does. A run may go on on another device.
        contract = self.contract.to_dict()
        del contract["verifier"]["name"]
        return {
            **identity(self.settings),
            "contract": contract,
            "data": examples_digest(itertools.chain(self.train, self.validation)),
        }

    def create(self) -> None:
        """Make hidden states and a fresh draft."""
        self.states.fill()
        self.draft = create_draft(self.config, self.verifier, self.states, self.settings.seed, self.vocabulary)
        if self.settings.compile == "on" or (self.settings.compile == "auto" and self.verifier.device.type == "cuda"):
            self.draft.compile_layers()
        self.optimizers = Optimizers(self.draft, self.settings)

    def finished(self) -> dict[str, Any] | None:
        """The summary of an earlier run with these settings that came to its end; None where there is none.

        Raises:
            InputError: the folder holds a run with other settings.
        """
        folder = self.settings.save_path
        if self.settings.restart or not self._continues() or not (folder / SUMMARY).exists():
            return None
        summary = read_summary(folder, "--save-path")
        whole = all((folder / name).is_dir() for name in (BEST, LAST))
        return summary.to_dict() if whole and summary.steps == self.total_steps else None

    def prepare(self) -> None:
        """Make hidden states and the draft, and take up an earlier run's state if there is one.

        Raises:
            InputError: the folder holds a run with other settings, or one whose states are all damaged.
        """
        folder = self.settings.save_path
        if self.settings.restart:
            self._forget_the_earlier_run()
        self._continues()
        state = self._saved.newest()
        self.create()
        write_json(folder / RECORD, {"facts": _plain(self.facts()), "settings": resolved(self.settings)})
        if state is not None:
            self._take_up(state)
            say(f"resuming after step {self.progress.step} of {self.total_steps}")

    def _continues(self) -> bool:
        """Whether the folder holds a run with these settings; False where it holds none."""
        folder = self.settings.save_path
        hint = "choose another folder, or start again in this one with --restart"
        if already_made(folder / RECORD, _plain(self.facts()), "--save-path", hint):
            return True
        if self._saved:
            raise InputError("--save-path", folder, f"holds training states, but no {RECORD} to say of what; {hint}")
        return False

    def _forget_the_earlier_run(self) -> None:
        """Its checkpoints stay until those of the new one replace them."""
        self._saved.clear()
        for name in (RECORD, SUMMARY):
            with writing(self.settings.save_path / name):
                (self.settings.save_path / name).unlink(missing_ok=True)

    def _take_up(self, state: ResumeState) -> None:
        try:
            self.draft.load_state_dict(state.draft)
            self.optimizers.load_state_dict(state.optimizers)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:  # whole, but of another version's draft
            raise InputError(
                "--save-path", self.settings.save_path, f"its training states do not fit the draft ({reason(error)}); "
                "start again with --restart",
            ) from None  # fmt: skip
        self.progress = state.progress

    def seconds_per_step(self, num_steps: int = 4) -> float:
        """Time updates, to plan how many fit into a given time. They spoil the draft: make a new trainer to train."""
        self._update(0, factor=0.0)  # the first one allocates
        start = time.monotonic()
        for step in range(num_steps):
            self._update(step % self.total_steps, factor=0.0)
        return (time.monotonic() - start) / num_steps

    def run(self) -> dict[str, Any]:
        """Train to the end, or up to a signal; returns the summary that is also written to `summary.json`.

        Raises:
            KeyboardInterrupt: stopped by a signal; the state is saved and the next run goes on from it.
        """
        settings = self.settings
        logger = make_logger(settings.logger, self._logs)
        every = max(1, round(settings.checkpoint_freq * self.steps_per_epoch))
        window: BlockMetrics | None = None
        losses: list[float] = []
        with _stop_requested() as stop, progress("training", self.total_steps, self.progress.step) as advance:
            texts = f"{len(self.train)} examples, {len(self.validation)} for validation"
            say(f"training: {self.total_steps} steps, {texts}")  # from here on, a signal stops after a step
            while self.progress.step < self.total_steps:
                factor = self._factor(self.progress.step)
                start = time.monotonic()
                loss, metrics = self._update(self.progress.step, factor)
                self.progress.seconds += time.monotonic() - start
                self.progress.step += 1
                losses.append(loss)
                window = metrics if window is None else window + metrics
                step = self.progress.step
                if step % settings.log_freq == 0 or step == self.total_steps:
                    figures = {"loss": sum(losses) / len(losses), **window.figures()}
                    logger.log({f"train/{k}": v for k, v in figures.items()} | {"train/lr_factor": factor}, step)
                    advance(0, f"loss {figures['loss']:.3f}, block length {figures['block_length']:.2f}")
                    window, losses = None, []
                advance()
                finished = step == self.total_steps
                if step % every == 0 or finished:
                    logger.log({f"validation/{k}": v for k, v in self._validate().items()}, step)
                if step % every == 0 or finished or stop():
                    self._save_state()
                if stop() and not finished:
                    logger.close()
                    command = "the same command" + (" without --restart" if settings.restart else "")
                    raise KeyboardInterrupt(f"stopped after step {step}; {command} goes on from there")
        logger.close()
        return self._finish()

    def _factor(self, step: int) -> float:
        settings = self.settings
        return learning_rate_factor(step, self.total_steps, settings.scheduler_warmup_ratio, settings.scheduler_type)

    def _update(self, step: int, factor: float) -> tuple[float, BlockMetrics]:
        loss, metrics = self._gradients(step)
        limit = self.settings.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(list(self.draft.parameters()), limit)
        if not (math.isfinite(loss) and bool(norm.isfinite())):
            self._refuse_nan(step)
        self.optimizers.step(factor)
        return loss, metrics

    def _rows_of(self, step: int) -> range:
        accum = self.settings.grad_accum
        return range(step * accum, min((step + 1) * accum, len(self.rows)))

    def _gradients(self, step: int) -> tuple[float, BlockMetrics]:
        """Add up the gradients of a step's rows, as if they were one row; returns its loss and metrics."""
        # Anchors of all rows first: what the step is divided by is known before the first backward pass.
        rows = [self._row(index) for index in self._rows_of(step)]
        k = self.config.num_speculative_tokens
        supervised = sum(int(positions_before(row.blocks, k)[1].sum()) for row in rows)
        objective = self.objective.at(step / self.total_steps)
        total, metrics = 0.0, None
        for row in rows:
            states = self.states.get(row.indices, noise_std=self.settings.noise_std, generator=row.generator)
            with self._autocast():
                outcome = row_loss(
                    self.draft, row.packed, states, row.blocks, objective, self.verifier.logit_softcap, supervised,
                    self.verifier.head_VE,
                )  # fmt: skip
            outcome.loss.backward()
            total += float(outcome.loss.detach())
            metrics = outcome.metrics if metrics is None else metrics + outcome.metrics
        assert metrics is not None
        return total, metrics

    def _row(self, index: int) -> _Row:
        indices = self.rows[index]
        row = pack_row([self.train[example] for example in indices])
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + index)
        blocks = choose_anchors(row.loss_mask, row.lengths, self.settings.max_anchors, generator)
        return _Row(indices, row, blocks, generator)

    def _autocast(self) -> Any:
        half = self.verifier.dtype == torch.bfloat16
        return torch.autocast(self.verifier.device.type, torch.bfloat16, enabled=half)

    def _refuse_nan(self, step: int) -> None:
        broken = [
            n for n, p in self.draft.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        names = [self.train[example].id for index in self._rows_of(step) for example in self.rows[index]]
        raise BlockdraftError(
            f"step {step + 1}: the gradient of {', '.join(broken[:3]) or 'the loss'} is not finite; "
            f"examples {names[:8]}; the state before it is kept: lower --lr or --muon-lr, or look at these examples"
        )

    def _validate(self) -> dict[str, float]:
        """Exact acceptance on the validation examples; the best so far becomes the best checkpoint."""
        k = self.contract.draft.num_speculative_tokens
        rounds = []
        first = len(self.train)
        with torch.inference_mode(), self._autocast():
            for index, example in enumerate(self.validation, start=first):
                (states,) = self.states.get([index])
                rounds += rounds_of_example(self.draft, example, states.taps, [k])[k]
        counts = AcceptanceCounts.of(rounds, k)
        figures = {"acceptance_length": counts.acceptance_length, "acceptance_rate": counts.acceptance_rate}
        self.progress.history += (Validation(self.progress.step, self.progress.seconds, **figures),)
        if counts.acceptance_length > self.progress.best_length:
            self.progress.best_length = counts.acceptance_length
            self._save_checkpoint(BEST)
        return figures

    def _save_checkpoint(self, name: str) -> None:
        seen = sum(len(row) for row in self.rows[: self.progress.step * self.settings.grad_accum])
        record = provenance(
            resolved(self.settings),
            self.verifier.device,
            step=self.progress.step,
            total_steps=self.total_steps,
            documents_seen=seen,
            train_documents=len(self.train),
            validation=[dataclasses.asdict(each) for each in self.progress.history[-1:]],
            chat=dataclasses.asdict(self.mode),
        )
        saved = self.settings.save_dtype
        dtype = self.verifier.dtype if saved == "auto" else resolve_dtype(saved, self.verifier.device, "--save-dtype")
        save_draft(self.settings.save_path / name, self.draft, self.contract, dtype, record)

    def _save_state(self) -> None:
        self._saved.save(ResumeState(self.draft.state_dict(), self.optimizers.state_dict(), self.progress))

    def _finish(self) -> dict[str, Any]:
        folder = self.settings.save_path
        self._save_checkpoint(LAST)
        summary = Summary(
            checkpoint=str(folder / BEST),
            steps=self.total_steps,
            documents=len(self.train),
            parameters=sum(parameter.numel() for parameter in self.draft.parameters()),
            best_acceptance_length=self.progress.best_length,
            history=self.progress.history,
        )
        write_summary(folder, summary)
        return summary.to_dict()


@contextmanager
def _stop_requested() -> Iterator[Any]:
    """Turn SIGTERM and Ctrl-C into a question that the loop asks between steps; a second Ctrl-C ends at once."""
    asked = False

    def ask(number: int, _: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True
        say("stopping after this step ...")

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _plain(value: Any) -> Any:
    """What JSON makes of a value, so that facts compare equal to facts read back."""
    return json.loads(json.dumps(value))
