"""Checks of a checkpoint against the records of the run that made it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from blockdraft.checkpoints.examine.command import plain
from blockdraft.checkpoints.examine.facts import CARD, CheckpointFacts
from blockdraft.checkpoints.examine.finding import Findings, Statement, agree, error, not_checked, warning
from blockdraft.checkpoints.store import PROVENANCE, TRAINING_STATE

_CLAIM = re.compile(r"(?<![0-9.])(\d+)[-_ ]?ep(?:och)?s?(?![a-z])", re.IGNORECASE)


def epochs_ran(facts: CheckpointFacts) -> Statement:
    """Epochs that the training state counts; None where there is none."""
    state = facts.state
    for name in ("epochs_completed", "epoch", "current_epoch", "num_train_epochs"):
        if isinstance(state.get(name), int | float):
            return Statement(f"{TRAINING_STATE} {name}", plain(state[name]))
    return Statement(TRAINING_STATE, None)


def run_name(facts: CheckpointFacts) -> Findings:
    """A name that claims epochs claims those that ran."""
    names = [
        *(Statement(f"{each.where} --{flag.replace('_', '-')}", each.text(flag))
          for each in facts.commands for flag in ("run_name", "save_path")),
        Statement("settings run_name", facts.settings.get("run_name")),
        Statement("training state run_name", facts.state.get("run_name")),
        Statement("folder", f"{facts.folder.resolve().parent.name}/{facts.folder.resolve().name}"),
    ]  # fmt: skip
    ran = epochs_ran(facts)
    asked = _asked(facts, "epochs")
    for name in names:
        claim = _CLAIM.search(str(name.value)) if name.value else None
        if claim is None:
            continue
        claimed = int(claim[1])
        # A checkpoint in mid-run is of fewer epochs than its run; other trainers count epochs from 0 or from 1.
        if ran.value is not None and not facts.own and claimed not in (int(ran.value), int(ran.value) + 1):
            yield error(name.where, name.value, f"claims {claimed} epochs; {ran.where} says {ran.value}")
            continue
        wrong = next((each for each in asked if each.value not in (None, claimed)), None)
        if wrong is not None:
            yield error(name.where, name.value, f"claims {claimed} epochs; {wrong.where} says {wrong.value}")


def hyperparameters(facts: CheckpointFacts) -> Findings:
    """Command, settings and training state record the same learning rate, epochs, anchors and seed."""
    for name in ("epochs", "lr", "muon_lr", "max_anchors", "seed", "total_seq_len"):
        stated = facts.state.get(name) if name != "epochs" else None
        yield from agree(
            [*_asked(facts, name), Statement(f"{TRAINING_STATE} {name}", plain(stated))],
            "the record of one of them is of another run",
        )


def progress(facts: CheckpointFacts) -> Findings:
    """Steps and epochs that ran are no more than were asked for; fewer is said."""
    ran = epochs_ran(facts)
    asked = next((each for each in _asked(facts, "epochs") if each.value is not None), None)
    if asked is not None and ran.value is not None:
        if ran.value > asked.value:
            yield error(ran.where, ran.value, f"{asked.where} says {asked.value}")
        elif not facts.own and ran.value < asked.value - 1:
            yield warning(
                ran.where, ran.value, f"{asked.where} says {asked.value}; weights of a run that had not ended"
            )
    steps, total = facts.provenance.get("step"), facts.provenance.get("total_steps")
    if isinstance(steps, int) and isinstance(total, int) and steps > total:
        yield error(f"{PROVENANCE} step", steps, f"total_steps is {total}")
    yield from agree(
        [Statement(f"{PROVENANCE} step", steps), Statement(f"{TRAINING_STATE} step", facts.state.get("step"))],
        "the training state is of another checkpoint",
    )
    if not facts.own and not facts.state and not facts.commands:
        yield not_checked("training records", "none in the folder", "hyperparameters and epochs cannot be compared")


def card(facts: CheckpointFacts) -> Findings:
    """The model card has a license and names the verifier."""
    if facts.card is None:
        if not facts.own:
            yield warning(CARD, "missing", "readers cannot know license and verifier")
        return
    try:
        metadata = _metadata(facts.card)
    except yaml.YAMLError as problem:
        yield error(f"{CARD} metadata", "not valid YAML", str(problem).splitlines()[0])
        return
    if not metadata.get("license"):
        yield warning(f"{CARD} license", metadata.get("license", "missing"), "nobody may use it without one")
    stated, recorded = metadata.get("base_model"), facts.recorded_verifier
    names = stated if isinstance(stated, list) else [stated]
    if recorded and stated and not any(_last(each) == _last(recorded) for each in names):
        yield error(f"{CARD} base_model", stated, f"the checkpoint's verifier is {recorded}")


def _metadata(text: str) -> dict[str, Any]:
    parts = text.split("---", 2)
    found = yaml.safe_load(parts[1]) if text.startswith("---") and len(parts) == 3 else {}
    return found if isinstance(found, dict) else {}


def _asked(facts: CheckpointFacts, name: str) -> list[Statement]:
    """What commands and settings say of a hyperparameter."""
    given = [Statement(f"{each.where} --{name.replace('_', '-')}", each.number(name)) for each in facts.commands]
    return [*given, Statement(f"settings {name}", plain(facts.settings.get(name)))]


def _last(name: Any) -> str:
    return str(name).rstrip("/").rpartition("/")[2].lower()
