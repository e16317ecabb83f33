"""The folder of a run: what it was asked for, its resume states, its checkpoints, and how it ended."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from blockdraft.checkpoints.store import COMMAND, TRAINING_STATE, VALIDATION, save_draft
from blockdraft.digests import already_made
from blockdraft.errors import InputError
from blockdraft.files import link, write_json, writing
from blockdraft.models.block_draft import BlockDraft
from blockdraft.runtime import resolve_dtype
from blockdraft.settings import resolved
from blockdraft.training.history import SUMMARY, Progress, Summary, read_summary, write_summary
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.provenance import provenance
from blockdraft.training.resume import ResumeState, ResumeStates

BEST, LAST, STATES = "checkpoint_best", "checkpoint_last", "states"
RECORD = "settings.json"
BEST_LINK = "best"


class RunFolder:
    """The folder `--save-path` of a planned run."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan, self.path = plan, plan.settings.save_path
        self.resume_states = ResumeStates(self.path / STATES, plan.settings.keep)

    def finished(self) -> dict[str, Any] | None:
        """The summary of an earlier run of this plan that came to its end; None where there is none.

        Raises:
            InputError: the folder holds a run with other settings.
        """
        if self.plan.settings.restart or not self.continues() or not (self.path / SUMMARY).exists():
            return None
        summary = read_summary(self.path, "--save-path")
        whole = all((self.path / name).is_dir() for name in (BEST, LAST))
        return summary.to_dict() if whole and summary.steps == self.plan.total_steps else None

    def continues(self) -> bool:
        """Whether the folder holds a run of this plan; False where it holds none.

        Raises:
            InputError: it holds a run with other settings.
        """
        hint = "choose another folder, or start again in this one with --restart"
        if already_made(self.path / RECORD, self._facts(), "--save-path", hint):
            return True
        if self.resume_states:
            raise InputError("--save-path", self.path, f"holds training states, but no {RECORD} to say of what; {hint}")
        return False

    def enter(self) -> ResumeState | None:
        """What an earlier run of this plan is resumed from, unless it is to start again.

        Raises:
            InputError: the folder holds a run with other settings, or one whose states are all damaged.
        """
        if self.plan.settings.restart:
            self._forget_the_earlier_run()
        self.continues()
        return self.resume_states.newest()

    def _forget_the_earlier_run(self) -> None:
        """Its checkpoints stay until those of the new one replace them."""
        if not self.plan.processes.first:  # the first one has done so by now
            return
        self.resume_states.clear()
        for name in (RECORD, SUMMARY):
            with writing(self.path / name):
                (self.path / name).unlink(missing_ok=True)

    def write_record(self) -> None:
        """State what the folder is of."""
        if not self.plan.processes.first:
            return
        write_json(self.path / RECORD, {"facts": self._facts(), "settings": resolved(self.plan.settings)})

    def save_checkpoint(self, name: str, draft: BlockDraft, progress: Progress) -> None:
        """Write the draft as it is after some steps; only the first process does."""
        if not self.plan.processes.first:
            return
        plan, settings = self.plan, self.plan.settings
        device = plan.verifier.device
        record = provenance(
            resolved(settings),
            device,
            step=progress.step,
            total_steps=plan.total_steps,
            documents_seen=sum(len(row) for row in plan.rows[: progress.step * plan.rows_per_step]),
            world_size=plan.processes.count,
            train_documents=len(plan.train),
            validation_documents=len(plan.validation),
            validation=[dataclasses.asdict(each) for each in progress.history[-1:]],
            chat=dataclasses.asdict(plan.mode),
            data_digest=plan.facts["data"],
            verifier=dataclasses.asdict(plan.verifier.identity),
            parent=None if plan.parent is None else plan.parent.facts,
        )
        saved = settings.save_dtype
        dtype = plan.verifier.dtype if saved == "auto" else resolve_dtype(saved, device, "--save-dtype")
        save_draft(self.path / name, draft, plan.contract, dtype, record, self._records(progress, record["command"]))
        if name == BEST:
            link(self.path / BEST_LINK, self.path / BEST)

    def _records(self, progress: Progress, command: str) -> dict[str, str]:
        """What stands beside the weights under the names that other trainers use too."""
        state = {
            "step": progress.step,
            "total_steps": self.plan.total_steps,
            "epoch": round(progress.step / self.plan.steps_per_epoch, 4),
            "seconds": progress.seconds,
            "best_acceptance_length": progress.best_length,
            "world_size": self.plan.processes.count,
        }
        history = [dataclasses.asdict(each) for each in progress.history]
        return {
            COMMAND: f"{command}\n",
            TRAINING_STATE: json.dumps(state, indent=2) + "\n",
            VALIDATION: json.dumps(history, indent=2) + "\n",
        }

    def finish(self, draft: BlockDraft, progress: Progress) -> dict[str, Any]:
        """Write the last checkpoint and the summary, which is returned."""
        self.save_checkpoint(LAST, draft, progress)
        summary = Summary(
            checkpoint=str(self.path / BEST),
            steps=self.plan.total_steps,
            documents=len(self.plan.train),
            parameters=sum(parameter.numel() for parameter in draft.parameters()),
            best_acceptance_length=progress.best_length,
            history=progress.history,
        )
        if self.plan.processes.first:
            write_summary(self.path, summary)
        return summary.to_dict()

    def _facts(self) -> Any:
        """The plan's facts as JSON makes them, so that they compare equal to facts read back."""
        return json.loads(json.dumps(self.plan.facts))
