"""Training: it learns, it resumes to the same bits, and it rejects what it should."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.checkpoints.store import load_draft
from blockdraft.decoding.one_pass import one_pass_acceptance
from blockdraft.errors import BlockdraftError, InputError, StoppedError
from blockdraft.ops.acceptance import AcceptanceCounts
from blockdraft.records import Example
from blockdraft.settings import TrainSettings
from blockdraft.training import trainer as module
from blockdraft.training.creation import draft_config, resolve_mask_token, spread_taps
from blockdraft.training.hidden_states import InProcess
from blockdraft.training.plan import TrainingPlan
from blockdraft.training.run_folder import BEST, LAST, STATES
from blockdraft.training.schedules import learning_rate_factor
from blockdraft.training.split import split_examples
from blockdraft.training.step import block_targets
from blockdraft.training.trainer import Trainer
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example, tiny_verifier_of

EXAMPLES = [random_example(24 + i % 5, 6 + i % 3, i) for i in range(12)]


def settings_of(folder: Path, **changes: object) -> TrainSettings:
    base = TrainSettings(
        dtype="float32",
        data_path=folder / "data",
        save_path=folder / "run",
        num_taps=3,
        epochs=2.0,
        total_seq_len=80,
        max_anchors=16,
        mask_token_id=100,
        train_data_ratio=0.7,
        logger="none",
        lr=2e-3,
        muon_lr=0.02,
        num_layers=2,
    )
    return dataclasses.replace(base, **changes)


def trained(settings: TrainSettings, verifier: CausalVerifier, examples=EXAMPLES) -> dict:
    return Trainer.prepare(TrainingPlan(settings, verifier, examples)).run()


def weights(folder: Path, name: str = LAST) -> bytes:
    return (folder / "run" / name / "model.safetensors").read_bytes()


def greedy_example(verifier: CausalVerifier, length: int = 40) -> Example:
    """A row that is the verifier's own greedy text."""
    ids = [5, 9, 23]
    for _ in range(length - 3):
        states = verifier.states([torch.tensor(ids)], [])[0]
        ids.append(int(verifier.logits(states.final[-1]).argmax()))
    return Example.of_reply("memo", ids[:3], ids[3:], "length")


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.slow
def test_memorising_one_row_reaches_full_acceptance(
    tiny_verifier: CausalVerifier, tmp_path: Path, method: str, optimizer: str
) -> None:
    memo = greedy_example(tiny_verifier)
    other = Example.of_reply("other", memo.input_ids[:3], memo.input_ids[3:-1], "length")
    settings = settings_of(
        tmp_path, speculator_type=method, optimizer=optimizer, epochs=250.0, max_anchors=0, total_seq_len=40,
        checkpoint_freq=1000.0, scheduler_type="constant", lr=1e-2,
        mask_token_id=next(token for token in range(97, 128) if token not in memo.input_ids),
    )  # fmt: skip
    trained(settings, tiny_verifier, [memo, other])
    draft, _ = load_draft(tmp_path / "run" / LAST, tiny_verifier, torch.float32)
    (outcome,) = one_pass_acceptance(tiny_verifier, draft, [memo], [7])
    assert outcome.disagreements == 0
    rounds = outcome.rounds[7]
    assert [r.delivered for r in rounds[:-1]] == [7] * (len(rounds) - 1)
    assert AcceptanceCounts.of(rounds, 7).acceptance_length > 7


def test_a_killed_run_resumes_to_the_same_bits(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    common = {"grad_accum": 2, "noise_std": 0.05, "epochs": 3.0}
    trained(settings_of(tmp_path / "whole", **common), tiny_verifier)
    original, seen = Trainer._update, []

    def update(self: Trainer, step: int, factor: float):
        seen.append([self.plan.rows[i] for i in self.plan.rows_of(step)])
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, step, factor)

    monkeypatch.setattr(Trainer, "_update", update)
    with pytest.raises(StoppedError, match="stopped after step 2"):
        trained(settings_of(tmp_path / "killed", **common), tiny_verifier)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    summary = trained(settings_of(tmp_path / "killed", **common), tiny_verifier)
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    plan = TrainingPlan(settings_of(tmp_path / "whole", **common), tiny_verifier, EXAMPLES).rows
    assert [row for step in seen for row in step] == plan and summary["steps"] == -(-len(plan) // 2)


def test_a_damaged_newest_state_falls_back_to_the_one_before(
    tiny_verifier: CausalVerifier, tmp_path: Path, said: Callable[[], str]
) -> None:
    settings = settings_of(tmp_path, epochs=3.0)
    trained(settings, tiny_verifier)
    wanted = weights(tmp_path)
    states = sorted((tmp_path / "run" / STATES).iterdir())
    assert len(states) == 2
    whole = (states[-1] / "state.pt").read_bytes()
    (states[-1] / "state.pt").write_bytes(whole[: len(whole) // 2])
    trained(settings, tiny_verifier)
    text = said()
    assert f"{states[-1].name} is damaged" in text and "resuming after step" in text
    assert weights(tmp_path) == wanted


def test_same_seed_same_bits_and_another_seed_others(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    results = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        trained(settings_of(tmp_path / name, seed=seed), tiny_verifier)
        results.append(weights(tmp_path / name))
    assert results[0] == results[1] != results[2]


def test_states_not_kept_in_memory_train_the_same(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """Without allowance for kept states they are made with each row; the result agrees to rounding."""
    drafts = []
    for name, memory in (("kept", 1.0), ("remade", 0.0)):
        (tmp_path / name).mkdir()
        trained(settings_of(tmp_path / name, states_memory_gib=memory), tiny_verifier)
        drafts.append(load_draft(tmp_path / name / "run" / LAST, tiny_verifier, torch.float32)[0])
    for a, b in zip(drafts[0].parameters(), drafts[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_other_settings_do_not_continue_a_run(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    trained(settings_of(tmp_path), tiny_verifier)
    with pytest.raises(InputError, match=r"was made with lr 0\.002, now asked for 0\.001"):
        Trainer.prepare(TrainingPlan(settings_of(tmp_path, lr=0.001), tiny_verifier, EXAMPLES))


def test_best_is_the_peak_of_real_acceptance(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.2, 1.9, 1.4])

    class Counts:
        def __init__(self, length: float) -> None:
            self.acceptance_length, self.acceptance_rate = length, 0.0

    monkeypatch.setattr(module.AcceptanceCounts, "of", lambda rounds, k: Counts(next(lengths)))
    summary = trained(settings_of(tmp_path, epochs=3.0), tiny_verifier)
    steps = [entry["step"] for entry in summary["history"]]
    record = json.loads((tmp_path / "run" / BEST / "provenance.json").read_text())
    assert record["step"] == steps[1] and summary["best_acceptance_length"] == 1.9


def test_nan_stops_the_run_and_names_where(
    tiny_verifier: CausalVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer.prepare(TrainingPlan(settings_of(tmp_path), tiny_verifier, EXAMPLES))
    with torch.no_grad():
        trainer.draft.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    says = r"step 1: the weight layers\.0\.mlp\.up_proj\.weight is not finite; rows 0, examples \['doc"
    with pytest.raises(BlockdraftError, match=says):
        trainer.run()


def test_norm_weights_move(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    """Float32 masters: no norm weight is stuck at one, as bfloat16 ones are at small rates."""
    trained(settings_of(tmp_path, lr=1e-4, epochs=10.0), tiny_verifier)
    draft, _ = load_draft(tmp_path / "run" / LAST, tiny_verifier, torch.float32)
    for name, parameter in draft.named_parameters():
        if "layernorm" in name or "hidden_norm" in name:
            assert float((parameter == 1).float().mean()) < 0.05, name


def test_tensorboard_receives_the_curves(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(settings_of(tmp_path, logger="tensorboard", log_freq=1), tiny_verifier)
    events = EventAccumulator(str(tmp_path / "run" / "logs" / "draft"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/accuracy", "train/block_length", "validation/acceptance_length"} <= tags
    assert len(events.Scalars("train/loss")) >= 4


def test_a_reduced_vocabulary_logs_its_coverage(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    trainer = Trainer.fresh(TrainingPlan(settings_of(tmp_path, draft_vocab_size=20), tiny_verifier, EXAMPLES))
    figures = trainer._update(0, 1.0).metrics.figures()
    assert 0 < figures["coverage"] < 1
    assert figures["accuracy"] == pytest.approx(figures["coverage"] * figures["accuracy_in_draft_vocabulary"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_compiled_layers_compute_the_same(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    losses = {}
    for compiled in ("on", "off"):
        trainer = Trainer.fresh(TrainingPlan(settings_of(tmp_path, compile=compiled), tiny_verifier, EXAMPLES))
        losses[compiled] = [trainer._update(step, 1.0).loss for step in range(2)]
        assert "layers.0.mlp.up_proj.weight" in trainer.draft.state_dict()
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_layer_ids": (0, 5)}, "--target-layer-ids: 5: must be in 0..4"),
        ({"target_layer_ids": (3, 1)}, "must be ascending"),
        ({"target_layer_ids": (1, 1)}, "without repetition"),
        ({"mask_token_id": 128}, "must be in 0..127"),
        ({"loss_fn": "kl", "per_position_loss_weight": "dpace"}, "dpace: is defined for --loss-fn ce alone"),
        ({"loss_fn": "hinge"}, "--loss-fn: hinge: known losses are ce, kl"),
        ({"loss_fn": '{"ce": -1}'}, "must be a number above 0"),
        ({"draft_vocab_size": 0}, "--draft-vocab-size: 0: must be 1 or more"),
        ({"num_attention_heads": 5}, "--num-attention-heads: 5: does not divide the hidden size 32"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "--num-key-value-heads: 3: must divide the 4 query"),
        ({"confidence_with_previous": True}, "--confidence-with-previous: True: needs a sequential head"),
        ({"mask_token_id": EXAMPLES[0].input_ids[7]}, "occurs in the data"),
    ],
)
def test_bad_choices_are_refused_by_name(
    tiny_verifier: CausalVerifier, tmp_path: Path, changes: dict, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        TrainingPlan(settings_of(tmp_path, **changes), tiny_verifier, EXAMPLES)
    assert not list(tmp_path.iterdir())


def test_mask_token_is_resolved_in_order(tiny_verifier: CausalVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_mask_token(101, tiny_verifier, EXAMPLES) == 101
    assert resolve_mask_token(None, tiny_verifier, EXAMPLES) == 97  # the first row that the tokenizer does not use
    tokenizer = tiny_verifier.tokenizer
    monkeypatch.setattr(type(tokenizer), "mask_token_id", 99, raising=False)
    assert resolve_mask_token(None, tiny_verifier, EXAMPLES) == 99
    monkeypatch.setattr(type(tokenizer), "mask_token_id", None, raising=False)
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 128)
    with pytest.raises(InputError, match="no mask token and no unused row"):
        resolve_mask_token(None, tiny_verifier, EXAMPLES)


def test_targets_are_the_verifiers_choice_one_before_the_slot() -> None:
    from blockdraft.ops.anchors import Blocks

    greedy = torch.arange(100, 112)
    blocks = Blocks(torch.tensor([2, 7]), torch.tensor([0, 0]), torch.tensor([10, 10]))
    targets = block_targets(greedy, blocks, 4)
    assert targets.mask_NK.tolist() == [[True] * 4, [True, True, False, False]]
    assert targets.ids_NK[targets.mask_NK].tolist() == [102, 103, 104, 105, 107, 108]


def test_targets_come_from_the_verifier_and_not_from_the_file(tiny_verifier: CausalVerifier) -> None:
    example = random_example(20, 5, 1)
    (states,) = InProcess(tiny_verifier, (2,)).get([example])
    wanted = tiny_verifier.model(torch.tensor([example.input_ids])).logits[0].argmax(-1)
    assert states.greedy[4:].tolist() == wanted[4:].tolist()
    assert states.greedy[:4].tolist() == [-1] * 4


def test_split_is_by_content() -> None:
    examples = [random_example(10, 3, i) for i in range(200)]
    train, validation = split_examples(examples, 0.8)
    assert not {d.id for d in train} & {d.id for d in validation}
    assert 130 < len(train) < 185
    more = [*reversed(examples), *(random_example(10, 3, i) for i in range(200, 260))]
    again, _ = split_examples(more, 0.8)
    assert {d.id for d in train} <= {d.id for d in again}
    for ratio in (0.001, 0.999):
        assert all(split_examples(examples[:5], ratio))
    with pytest.raises(InputError, match="two different"):
        split_examples([examples[0]] * 4, 0.5)


def test_default_taps_are_the_published_ones() -> None:
    assert spread_taps(36, 5) == (2, 10, 18, 26, 34)  # the published Qwen3-8B draft, in this numbering
    assert spread_taps(30, 1) == (15,)
    assert spread_taps(4, 5) == (2,)


def test_draft_takes_the_verifiers_shape(tiny_verifier: CausalVerifier, tmp_path: Path) -> None:
    config = draft_config(settings_of(tmp_path), tiny_verifier, EXAMPLES)
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (
        16,
        4,
        2,
        64,
    )


def test_schedules() -> None:
    for kind in ("cosine", "linear", "constant"):
        factors = [learning_rate_factor(s, 100, 0.1, kind) for s in range(100)]
        assert factors[0] == pytest.approx(0.1) and max(factors) == 1.0 == factors[10]
        assert factors[10:] == sorted(factors[10:], reverse=True)
        assert (factors[-1] < 0.05) == (kind != "constant")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_replies_of_one_token_teach_nothing_and_break_nothing(
    tiny_verifier: CausalVerifier, tmp_path: Path, method: str
) -> None:
    """No block fits behind them: rows of nothing else are steps without a loss."""
    short = [Example.of_reply(str(i), [5 + i, 6, 7], [8 + i], "stop") for i in range(6)]
    settings = settings_of(tmp_path, epochs=1.0, total_seq_len=4, train_data_ratio=0.5, speculator_type=method)
    result = trained(settings, tiny_verifier, [*short, random_example(24, 6, 9)])
    assert result["steps"] >= 3


@pytest.mark.parametrize(("asked", "saved"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_a_draft_is_saved_in_the_dtype_it_is_served_in(tmp_path: Path, asked: str, saved: torch.dtype) -> None:
    """The engine warned at every float32 weight that it loads for a bfloat16 verifier."""
    verifier = tiny_verifier_of("llama", torch.bfloat16)
    trained(settings_of(tmp_path, dtype="bfloat16", save_dtype=asked, epochs=0.1), verifier)
    tensors = load_file(tmp_path / "run" / LAST / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {saved}
    load_draft(tmp_path / "run" / LAST, verifier, torch.bfloat16)
