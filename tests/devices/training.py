"""Training on a device: steps, optimizers, states, resuming, checkpoints."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.store import WEIGHTS, load_draft
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import BEST, LAST
from blockdraft.training.trainer import Trainer
from devices.stage import Check, plan_of, require_close, verifier_on

METHODS = ("dflash", "dflare", "dspark")
STEPS: dict[str, dict[str, object]] = {
    **{method: {"speculator_type": method} for method in METHODS},
    **{
        f"{head} and confidence": {"speculator_type": "dspark", "sequential_head": head, "markov_rank": 6,
                                   "confidence_with_previous": head != "rnn"}
        for head in ("markov", "gated", "rnn")
    },
    "sliding window": {"sliding_window": 7, "sliding_window_non_causal": True},
    "causal sliding window": {"sliding_window": 7},
    "causal blocks": {"causal_block": True},
    "kinds of layers side by side": {"sliding_window": 7, "full_attention_indices": (1,)},
    "reduced vocabulary": {"speculator_type": "dflare", "draft_vocab_size": 60},
    "reduced vocabulary and heads": {"speculator_type": "dspark", "draft_vocab_size": 60, "loss_fn": "tv"},
    "every loss": {
        "loss_fn": '{"ce": 1, "kl": 1, "rkl": 1, "jsd": 1, "tv": 1, "nla": 1, "lk_hybrid": 1}', "draft_vocab_size": 60,
    },
    "noise": {"noise_std": 0.1},
}  # fmt: skip


def _pair(device: str, folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    """Trainers on the device and on the CPU, of the same draft."""
    plans = [plan_of(verifier_on(where, kind, dtype), folder / where, **changes) for where in (device, "cpu")]
    return [Trainer.fresh(plan) for plan in plans]


def _same_step(device: str, folder: Path, kind: str = "llama", **changes: object) -> None:
    """Loss, metrics and gradients of a row are the CPU's."""
    found, wanted = _pair(device, folder, kind, **changes)
    losses, metrics = zip(*(trainer._gradients(0) for trainer in (found, wanted)), strict=True)
    assert abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[1]) and losses[1] > 0, losses
    assert metrics[0].slots.tolist() == metrics[1].slots.tolist() and int(metrics[1].slots.sum()) > 0
    for (name, ours), right in zip(found.draft.named_parameters(), wanted.draft.parameters(), strict=True):
        assert ours.grad is not None and right.grad is not None, name
        assert ours.grad.device == found.plan.verifier.device, name
        require_close(ours.grad, right.grad)


def _half_precision_step(device: str, folder: Path, method: str) -> None:
    """In bfloat16 under autocast, loss and gradients are near those of float32."""
    found = Trainer.fresh(plan_of(verifier_on(device, dtype=torch.bfloat16), folder, speculator_type=method))
    wanted = Trainer.fresh(plan_of(verifier_on("cpu"), folder, speculator_type=method))
    losses = [trainer._gradients(0)[0] for trainer in (found, wanted)]
    assert abs(losses[0] - losses[1]) < 0.1 * losses[1], losses
    gradients = [torch.cat([p.grad.flatten().cpu() for p in t.draft.parameters()]) for t in (found, wanted)]
    assert torch.cosine_similarity(*gradients, dim=0) > 0.9


def _same_updates(device: str, folder: Path, optimizer: str, accum: int) -> None:
    """After some updates the weights are the CPU's."""
    trainers = _pair(device, folder, optimizer=optimizer, grad_accum=accum, epochs=4.0, weight_decay=0.01)
    for trainer in trainers:
        if optimizer == "muon":  # in float32 on both, though one may have bfloat16
            trainer.optimizers._members[0]._dtype = torch.float32
        for step in range(2):
            trainer._update(step, 0.5)
    for ours, right in zip(*(trainer.draft.parameters() for trainer in trainers), strict=True):
        assert _distance(ours, right) < 0.05


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far weights are apart, beside their size."""
    return float(((found.cpu() - wanted).norm() / wanted.norm()).detach())


def _weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / name / WEIGHTS)


def _whole_run(device: str, folder: Path, **changes: object) -> None:
    """A run trains, validates, saves, and what it saves loads on the device and on the CPU as the same draft."""
    trainer = Trainer.prepare(plan_of(verifier_on(device), folder, **changes))
    summary = trainer.run()
    assert summary["best_acceptance_length"] >= 1 and (folder / "run" / BEST).is_dir()
    drafts = [load_draft(folder / "run" / LAST, verifier_on(where), torch.float32)[0] for where in (device, "cpu")]
    for (name, found), wanted in zip(drafts[0].state_dict().items(), drafts[1].state_dict().values(), strict=True):
        assert torch.equal(found.cpu(), wanted), name
    assert drafts[0].norm.weight.device == trainer.plan.verifier.device


def _stopped(plan: TrainingPlan) -> None:
    """Leave a run's state as a signal after the first step leaves it."""
    trainer = Trainer.prepare(plan)
    trainer._update(0, trainer._factor(0))
    trainer.progress.step = 1
    trainer.folder.resume_states.save(trainer._state())


def _resumes(device: str, folder: Path, optimizer: str) -> None:
    """A stopped run ends with the bits of one that was not; its state does not depend on where it was computed."""
    Trainer.prepare(plan_of(verifier_on(device), folder / "whole", optimizer=optimizer)).run()
    ended = {}
    for name, (first, then) in {
        "same": (device, device),
        "to CPU": (device, "cpu"),
        "from CPU": ("cpu", device),
    }.items():
        _stopped(plan_of(verifier_on(first), folder / name, optimizer=optimizer))
        trainer = Trainer.prepare(plan_of(verifier_on(then), folder / name, optimizer=optimizer))
        assert trainer.progress.step == 1
        trainer.run()
        ended[name] = _weights(folder / name, LAST)
    for name, wanted in _weights(folder / "whole", LAST).items():
        assert torch.equal(ended["same"][name], wanted), name
        for other in ("to CPU", "from CPU"):
            # Muon computes in bfloat16 where a device has it natively.
            bound = 0.5 if optimizer == "muon" else 0.05
            assert _distance(ended[other][name], wanted) < bound, (other, name)


def _states_on_disk(device: str, folder: Path) -> None:
    """Hidden states are written and read back as they are; the CPU reads them, too."""
    common = {"hidden_states_path": folder / "states", "loss_fn": "kl", "states_memory_gib": 0.0}
    plan = plan_of(verifier_on(device), folder / "a", **common)
    trainer = Trainer.prepare(plan)
    made = plan.states.provider._maker.get(plan.examples)  # type: ignore[attr-defined]
    read = plan.states.get(range(len(plan.examples)))
    for ours, right in zip(read, made, strict=True):
        for name in ("taps", "greedy", "final"):
            assert getattr(ours, name).device == trainer.plan.verifier.device
            require_close(getattr(ours, name), getattr(right, name).cpu())
    trainer.run()
    again = plan_of(verifier_on("cpu"), folder / "b", **common, on_missing="raise")
    Trainer.prepare(again)
    for ours, right in zip(again.states.get(range(4)), read, strict=False):
        assert torch.equal(ours.taps, right.taps.cpu())


CHECKS = (
    *(Check(f"a step: {name}", partial(_same_step, **changes)) for name, changes in STEPS.items()),
    *(
        Check(f"a step with a T5Gemma 2: {method}", partial(_same_step, kind="t5gemma2", speculator_type=method))
        for method in METHODS
    ),
    *(Check(f"a step in bfloat16: {method}", partial(_half_precision_step, method=method)) for method in METHODS),
    *(
        Check(f"updates: {optimizer}, {accum} rows each", partial(_same_updates, optimizer=optimizer, accum=accum))
        for optimizer, accum in itertools.product(("muon", "adamw"), (1, 2))
    ),
    *(Check(f"a run: {method}", partial(_whole_run, speculator_type=method)) for method in METHODS),
    *(Check(f"resuming: {optimizer}", partial(_resumes, optimizer=optimizer)) for optimizer in ("muon", "adamw")),
    Check("hidden states on disk", _states_on_disk),
)
