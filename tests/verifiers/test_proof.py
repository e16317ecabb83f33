"""The proof at loading fails when it should: each way of computing a family wrongly that was seen, put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blockdraft.errors import InputError
from blockdraft.ops.ragged_kv import RaggedKV
from blockdraft.verifiers import attention, causal, output_side, proof
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.loading import proved
from conftest import tiny_encoder_decoder, tiny_tokenizer
from verifiers.families import ALL_FULL, ONE_OF_EACH, WINDOW, Family, tiny_model

Break = Callable[[pytest.MonkeyPatch], None]


def without(argument: str) -> Break:
    """Attention that drops an argument, as transformers' own SDPA function does."""

    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = attention.plain_attention

        def dropping(query, key, value, mask, scale, softcap=None, sinks_Q=None):
            given = {"softcap": softcap, "sinks_Q": sinks_Q} | {argument: None}
            return whole(query, key, value, mask, scale, **given)

        monkeypatch.setattr(attention, "plain_attention", dropping)

    return change


def window_from_the_field_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_side, "window_of", lambda config: config.sliding_window)
    monkeypatch.setattr(causal, "layer_types", lambda config: ())


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_side, "window_of", lambda config: None)


def no_logit_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_side, "logit_scale_of", lambda config: 1.0)


def taps_of_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = causal.stacked
    monkeypatch.setattr(causal, "stacked", lambda taps, ids, final: whole(taps, ids, final).roll(1, dims=-2))


def positions_of_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: RaggedKV, width: int) -> torch.Tensor:
        return (self.longest + torch.arange(width)).expand(len(self.lengths), -1)

    monkeypatch.setattr(RaggedKV, "positions", wrong)


FAULTS = {
    "soft cap dropped": (Family("gemma2"), without("softcap")),  # at its default of 50
    "sinks dropped": (Family("gpt_oss"), without("sinks_Q")),
    "window beside full layers": (Family("qwen2", {"sliding_window": WINDOW, "layer_types": ALL_FULL,
                                                   "use_sliding_window": True}), window_from_the_field_alone),
    "window of all layers ignored": (Family("mistral"), no_window),
    "long window ignored": (Family("mistral", {"sliding_window": 200}), no_window),
    "long window of some layers ignored": (Family("qwen3", {"sliding_window": 200, "layer_types": ONE_OF_EACH,
                                                            "use_sliding_window": True}), no_window),
    "scale of logits ignored": (Family("granite", {"logits_scaling": 4.0}), no_logit_scale),
    "taps off by one": (Family("llama"), taps_of_the_layer_before),
    "positions not ragged": (Family("llama"), positions_of_the_longest_row),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    family, change = FAULTS[fault]
    proved(tiny_model(family), tiny_tokenizer(), "right")
    change(monkeypatch)
    with pytest.raises(InputError, match="differ from the model's own by"):
        proved(tiny_model(family), tiny_tokenizer(), "wrong")


@pytest.mark.parametrize(
    "fault", ["long window ignored", "taps off by one", "positions not ragged", "scale of logits ignored"]
)
def test_a_fault_is_seen_in_half_precision(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    family, change = FAULTS[fault]

    def half() -> torch.nn.Module:
        model = tiny_model(family)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model

    proved(half(), tiny_tokenizer(), "right")
    change(monkeypatch)
    with pytest.raises(InputError, match="differ from the model's own by"):
        proved(half(), tiny_tokenizer(), "wrong")


def test_an_encoder_decoder_is_proved_past_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_encoder_decoder()
    for config in (verifier.model.config.decoder, verifier.model.config.encoder.text_config):
        config.sliding_window = 60
    verifier.prove()
    monkeypatch.setattr(EncoderDecoderVerifier, "_encoder_window", property(lambda self: 10**6))
    with pytest.raises(InputError, match="differ from the model's own by"):
        verifier.prove()


def test_an_argument_of_attention_that_is_not_known_is_an_error() -> None:
    """Nothing that a family hands to its attention is dropped without a word."""
    query = torch.zeros(1, 4, 3, 8)
    known = {"sliding_window": 5, "is_causal": True, "output_attentions": False, "position_ids": torch.zeros(3)}
    attention.folded_attention(torch.nn.Module(), query, query, query, None, **known)
    for name, value in {"block_indices": torch.zeros(3), "temperature": 2.0}.items():
        with pytest.raises(NotImplementedError, match=name):
            attention.folded_attention(torch.nn.Module(), query, query, query, None, **{name: value})


def test_a_proof_leaves_the_model_as_it_was() -> None:
    model = tiny_model(Family("mistral", {"sliding_window": 200}))
    proved(model, tiny_tokenizer(), "long")
    assert model.config.sliding_window == 200
    assert model.config._attn_implementation == attention.NAME


def test_the_size_of_the_logits_does_not_matter() -> None:
    """The bound is relative to the spread, not to the largest logit: a constant on all logits changes nothing."""
    wanted = torch.randn(6, 50)
    found = wanted + 0.01 * torch.randn(6, 50)
    error = proof.difference(found, wanted, torch.float32)
    assert error == pytest.approx(proof.difference(100 * found, 100 * wanted, torch.float32))
    assert error == pytest.approx(proof.difference(found + 1000, wanted + 1000, torch.float32), rel=1e-2)
    assert not proof.difference(found * torch.nan, wanted, torch.float32) <= proof.EXACT
