"""From settings to a draft: presets, components, layers, widths, vocabulary, and what is rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockdraft.errors import InputError
from blockdraft.records import Example
from blockdraft.settings import TrainSettings
from blockdraft.training.creation import (
    choose_taps,
    draft_config,
    draft_vocabulary,
    layer_kinds,
    make_objective,
    resolve_components,
    resolve_mask_token,
)
from blockdraft.verifiers.causal import CausalVerifier
from conftest import random_example, tiny_config

EXAMPLES = [random_example(24, 6, i) for i in range(4)]


def settings(**changes: object) -> TrainSettings:
    base = TrainSettings(
        data_path=Path("data"), save_path=Path("run"), dtype="float32", mask_token_id=100, num_taps=3, num_layers=2
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("method", ["dflash", "dflare", "dspark"])
def test_a_preset_is_the_method_it_names(tiny_verifier: CausalVerifier, method: str) -> None:
    config = draft_config(settings(speculator_type=method), tiny_verifier, EXAMPLES)
    assert config.method == method
    assert config.num_speculative_tokens == (8 if method == "dspark" else 7)
    assert config.markov_rank == (256 if method == "dspark" else 0)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"context_kv": "separate"}, "blockdraft"),
        ({"sequential_head": "rnn"}, "dspark"),
        ({"sample_from_anchor": True}, "dspark"),
        ({"confidence_head": "linear"}, "dspark"),
        ({"speculator_type": "dflare", "sequential_head": "markov"}, "blockdraft"),
        ({"speculator_type": "dspark", "sequential_head": "none"}, "dspark"),
        ({"causal_block": True}, "dflash"),
        ({"sliding_window": 9, "full_attention_indices": (0,), "sliding_window_non_causal": True}, "dflash"),
        ({"sliding_window": 9, "full_attention_indices": (0,)}, "blockdraft"),
    ],
)
def test_a_named_socket_replaces_the_presets(tiny_verifier: CausalVerifier, changes: dict, method: str) -> None:
    assert draft_config(settings(**changes), tiny_verifier, EXAMPLES).method == method


def test_without_a_head_the_preset_does_not_insist_on_what_it_reads() -> None:
    for gone in ("sequential_head", "confidence_head"):
        components = resolve_components(settings(speculator_type="dspark", **{gone: "none"}))
        assert not components["confidence_with_previous"]
    with pytest.raises(InputError, match="needs a sequential head"):
        tiny_config("dspark", sequential_head="none", markov_rank=0)


def test_layers_slide_and_are_causal_as_told() -> None:
    def kinds(**changes: Any) -> tuple[Any, Any]:
        found = layer_kinds(settings(**changes))
        return found["windows"], found["causal"]

    assert kinds() == ((None, None), (False, False))
    assert kinds(causal_block=True) == ((None, None), (True, True))
    assert kinds(sliding_window=9) == ((9, 9), (True, True))
    assert kinds(sliding_window=9, sliding_window_non_causal=True) == ((9, 9), (False, False))
    assert kinds(sliding_window=9, full_attention_indices=(1,)) == ((9, None), (True, False))
    for wrong, says in (
        ({"full_attention_indices": (0,)}, "needs --sliding-window"),
        ({"sliding_window": 9, "full_attention_indices": (2,)}, "layers are 0..1"),
        ({"sliding_window": 0}, "must be 1 or more"),
        ({"causal_block": True, "sliding_window": 9, "sliding_window_non_causal": True}, "contradicts"),
    ):
        with pytest.raises(InputError, match=says):
            settings(**wrong)


def test_widths_are_the_verifiers_unless_given(tiny_verifier: CausalVerifier) -> None:
    def widths(**changes: int) -> tuple[int, int, int, int]:
        config = draft_config(settings(**changes), tiny_verifier, EXAMPLES)
        return config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size

    assert widths() == (4, 2, 16, 64)
    assert widths(num_attention_heads=2) == (2, 2, 16, 64)
    assert widths(num_attention_heads=8, num_key_value_heads=4, intermediate_size=40) == (8, 4, 4, 40)
    assert widths(num_attention_heads=5, head_dim=8, num_key_value_heads=1) == (5, 1, 8, 64)
    assert widths(num_attention_heads=1) == (1, 1, 32, 64)  # the verifier's two key/value heads do not divide one


def test_objective_defaults_follow_the_type() -> None:
    assert make_objective(settings(), "dflash").terms == {"ce": 1.0}
    assert make_objective(settings(), "dflash").weighting == "dpace"
    assert make_objective(settings(), "dspark").terms == {"ce": 0.1, "tv": 0.9}
    assert make_objective(settings(), "dspark").weighting == "fixed-exp-decay"
    assert make_objective(settings(loss_fn="ce"), "dspark").weighting == "dpace"
    assert make_objective(settings(loss_fn="kl"), "dflash").weighting == "fixed-exp-decay"


def test_a_vocabulary_larger_than_the_tokens_seen_is_filled_and_says_so(said: Callable[[], str]) -> None:
    examples = [Example.of_reply("a", [9, 9], [50, 60, 50], "stop")]
    ids = draft_vocabulary(tiny_config(draft_vocab_size=5), examples)
    assert ids is not None and ids.tolist() == [0, 1, 2, 50, 60]
    text = said()
    assert "100.00% of the reply tokens" in text and "only 2 tokens occur, the 3 smallest other ids fill up" in text
    small = draft_vocabulary(tiny_config(draft_vocab_size=1), examples)
    assert small is not None and small.tolist() == [50]
    assert "66.67% of the reply tokens" in said()
    assert draft_vocabulary(tiny_config(), examples) is None


@pytest.mark.parametrize("same", ["pad_token_id", "eos_token_id"])
def test_a_mask_token_that_is_padding_or_end_must_be_asked_for(tiny_verifier: CausalVerifier, same: str) -> None:
    tokenizer = SimpleNamespace(mask_token_id=99, mask_token="<x>", pad_token_id=0, eos_token_id=1)
    setattr(tokenizer, same, 99)
    verifier = SimpleNamespace(tokenizer=tokenizer, identity=tiny_verifier.identity)
    with pytest.raises(InputError, match="also its padding or end token"):
        resolve_mask_token(None, verifier, EXAMPLES)  # type: ignore[arg-type]
    assert resolve_mask_token(99, verifier, EXAMPLES) == 99  # type: ignore[arg-type]


def test_drafts_of_one_seed_are_equal(tiny_verifier: CausalVerifier) -> None:
    from conftest import tiny_draft

    first, second = (tiny_draft(tiny_verifier, tiny_config("dspark", draft_vocab_size=40)) for _ in range(2))
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_taps_by_depth_fit_verifiers_of_any_size(tiny_verifier: CausalVerifier) -> None:
    depths = (0.0769, 0.1923, 0.3077, 0.4231, 0.5385, 0.6538, 0.7692, 0.8462)
    given = settings(tap_depths=depths, num_taps=None)
    assert choose_taps(given, "layerwise", 26) == (2, 5, 8, 11, 14, 17, 20, 22)
    assert choose_taps(given, "layerwise", 4) == (0, 1, 2, 3)  # those that fall together are one
    assert draft_config(given, tiny_verifier, EXAMPLES).target_layer_ids == (0, 1, 2, 3)
    with pytest.raises(InputError, match="give these or --target-layer-ids"):
        draft_config(settings(tap_depths=depths, target_layer_ids=(1, 2)), tiny_verifier, EXAMPLES)
    with pytest.raises(InputError, match=r"--tap-depths: 1.5: must be 0 or more and at most 1"):
        settings(tap_depths=(1.5,))


def test_a_draft_vocabulary_beyond_the_verifiers_is_all_of_it(tiny_verifier: CausalVerifier) -> None:
    config = draft_config(settings(draft_vocab_size=32_000), tiny_verifier, EXAMPLES)
    assert config.draft_vocab_size == config.vocab_size and not config.reduced
