"""What test_several_processes.py starts by torchrun: a run of one or more processes, its curve written to a file.

Arguments: the folder, a speculator type, an optimizer, "sharded" or "copied", rows of a step in each process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from blockdraft.settings import TrainSettings
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.processes import Processes, joined
from blockdraft.training.trainer import Trainer
from conftest import random_example, tiny_verifier_of

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(16)]


class Watched(Trainer):
    """Keeps loss and counts of every update."""

    def _update(self, step: int, factor: float):
        update = super()._update(step, factor)
        counts = update.metrics.correct.tolist(), update.metrics.slots.tolist()
        self.curve = [*getattr(self, "curve", []), [update.loss, *counts]]
        return update


def main(folder: Path, method: str, optimizer: str, kind: str, accum: int) -> None:
    torch.set_num_threads(1)
    with joined("cpu") as processes:
        train(processes, folder, method, optimizer, kind, accum)


def train(processes: Processes, folder: Path, method: str, optimizer: str, kind: str, accum: int) -> None:
    settings = TrainSettings(
        dtype="float32", data_path=folder / "data", save_path=folder / "run", num_taps=3, num_layers=2,
        epochs=2.2, total_seq_len=60, max_anchors=12, mask_token_id=100, train_data_ratio=0.7, logger="none",
        lr=2e-3, muon_lr=0.02, weight_decay=0.01, speculator_type=method, optimizer=optimizer, grad_accum=accum,
        fsdp_shard=kind == "sharded", noise_std=0.01,
    )  # fmt: skip
    plan = TrainingPlan(settings, tiny_verifier_of("llama"), EXAMPLES, processes=processes)
    # An uneven end: the last step has fewer rows than there are processes.
    assert len(plan.rows_of(plan.total_steps - 1)) == 1 < plan.rows_per_step
    trainer = Watched.prepare(plan)
    summary = trainer.run()
    if processes.first:
        found = {"curve": trainer.curve, "history": [e["acceptance_length"] for e in summary["history"]]}
        (folder / "curve.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]))
