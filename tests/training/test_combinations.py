"""Combinations of components train a step, decode losslessly, agree with one pass, save and reload.

By default a covering array in which every three settings meet in every way; all 704 with the marker `exhaustive`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from blockdraft.checkpoints.store import load_draft, save_draft
from blockdraft.decoding.engine import DecodingEngine, Reply
from blockdraft.decoding.one_pass import one_pass_acceptance
from blockdraft.records import Example
from blockdraft.settings import SamplingSettings, TrainSettings
from blockdraft.training.hidden_states import TrainingStates
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example
from training.covering import covering_array, interactions

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(6)]
PROMPTS = [random_example(n, 1, n).input_ids for n in (3, 30, 17)]
TAPS = (0, 2, 4)
LAYERS = {
    "full": {},
    "causal": {"causal_block": True},
    "sliding": {"sliding_window": 7, "sliding_window_non_causal": True},
    "mixed": {"sliding_window": 7, "full_attention_indices": (1,)},
}
SETTINGS = {
    "fusion": ("projected", "layerwise"),
    "kv": ("shared", "separate"),
    "sequential": ("none", "markov", "gated", "rnn"),
    "confidence": ("none", "linear"),
    "previous": (False, True),
    "from_anchor": (False, True),
    "vocabulary": (None, 60),
    "layers": tuple(LAYERS),
}
STRENGTH = 3


def is_allowed(row: tuple) -> bool:
    """A confidence head that reads the token before needs both heads."""
    settings = dict(zip(SETTINGS, row, strict=True))
    return not settings["previous"] or (settings["sequential"] != "none" and settings["confidence"] == "linear")


ALL = [row for row in itertools.product(*SETTINGS.values()) if is_allowed(row)]
CHOSEN = covering_array(ALL, STRENGTH)


class Stage:
    """What all combinations share: hidden states, and the verifier's own text."""

    def __init__(self, verifier: CausalVerifier) -> None:
        self.verifier = verifier
        self.sampling = SamplingSettings(max_new_tokens=14, ignore_eos=True)
        self.plain = DecodingEngine(verifier, None, 0, self.sampling).generate(PROMPTS, 3)
        self.states: dict[int, TrainingStates] = {}

    def examples(self) -> list[Example]:
        return [Example.of_reply(str(r.index), r.prompt, r.tokens, "length") for r in self.plain]

    def trainer(self, settings: TrainSettings) -> Trainer:
        """A trainer whose hidden states are made once for all combinations."""
        plan = TrainingPlan(settings, self.verifier, EXAMPLES)
        needs = int(plan.objective.needs_teacher)
        if needs in self.states:
            plan = TrainingPlan(settings, self.verifier, EXAMPLES, self.states[needs])
        self.states[needs] = plan.states
        return Trainer.fresh(plan)


@pytest.fixture(scope="module")
def stage(tiny_verifier: CausalVerifier) -> Stage:
    return Stage(tiny_verifier)


def text(replies: list[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


def test_the_chosen_combinations_hold_every_allowed_triple() -> None:
    wanted = set()
    for columns in itertools.combinations(SETTINGS, STRENGTH):
        for values in itertools.product(*(SETTINGS[column] for column in columns)):
            given = dict(zip(columns, values, strict=True))
            # The one rule, said again: `previous` goes neither without the sequential nor without the confidence head.
            if given.get("previous") and "none" in (given.get("sequential"), given.get("confidence")):
                continue
            wanted.add(frozenset((list(SETTINGS).index(column), value) for column, value in given.items()))
    assert wanted == set().union(*(interactions(row, STRENGTH) for row in CHOSEN))
    assert len(ALL) == 704 and set(CHOSEN) <= set(ALL)
    assert len(CHOSEN) < len(ALL) // 10  # else it would be no shortcut


@pytest.mark.parametrize(
    tuple(SETTINGS), [row if row in CHOSEN else pytest.param(*row, marks=pytest.mark.exhaustive) for row in ALL]
)
def test_a_combination_trains_decodes_saves_and_reloads(
    stage: Stage, tmp_path: Path, fusion: str, kv: str, sequential: str, confidence: str, previous: bool,
    from_anchor: bool, vocabulary: int | None, layers: str,
) -> None:  # fmt: skip
    settings = TrainSettings(
        dtype="float32", data_path=tmp_path, save_path=tmp_path, logger="none", target_layer_ids=TAPS, epochs=1.0,
        total_seq_len=80, max_anchors=12, mask_token_id=100, train_data_ratio=0.7, block_size=5,
        context_fusion=fusion, context_kv=kv, sequential_head=sequential, markov_rank=6, confidence_head=confidence,
        confidence_with_previous=previous, sample_from_anchor=from_anchor, draft_vocab_size=vocabulary,
        loss_fn='{"ce": 0.5, "kl": 0.5}' if from_anchor else "ce",
        **{"num_layers": 2, "lr": 2e-3, "muon_lr": 4e-2, **LAYERS[layers]},
    )  # fmt: skip
    trainer = stage.trainer(settings)
    before = {name: parameter.detach().clone() for name, parameter in trainer.draft.named_parameters()}
    update = trainer._update(0, 1.0)
    loss, metrics = update.loss, update.metrics
    assert loss > 0 and int(metrics.slots.sum()) > 0
    still = [name for name, p in trainer.draft.named_parameters() if torch.equal(p, before[name])]
    assert not still

    folder = tmp_path / "draft"
    save_draft(folder, trainer.draft, trainer.plan.contract, torch.float32, {})
    draft, contract = load_draft(folder, stage.verifier, torch.float32)
    assert draft.config.method == contract.draft.method
    save_draft(tmp_path / "again", draft, contract, torch.float32, {})
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    most = contract.draft.num_speculative_tokens
    assert most == (5 if from_anchor else 4)
    plans = [(most, 0.0)]
    if layers == "full":  # what a smaller K changes does not depend on the kind of layer
        plans.append((2, 0.0))
    if confidence != "none":
        plans.append((most, 0.2))
    for k, threshold in plans:
        engine = DecodingEngine(stage.verifier, draft, k, stage.sampling, threshold)
        drafted = engine.generate(PROMPTS, 2)
        assert text(drafted) == text(stage.plain)
        outcomes = one_pass_acceptance(stage.verifier, draft, stage.examples(), [k], threshold)
        assert [reply.rounds for reply in drafted] == [outcome.rounds[k] for outcome in outcomes]
