"""The in-process verifier against transformers' own forward, for several families."""

from __future__ import annotations

import pytest
import torch

from blockdraft.errors import InputError
from blockdraft.verifiers.causal import CausalVerifier
from conftest import FAMILIES, LAYERS, tiny_model, tiny_tokenizer, tiny_verifier_of


@pytest.fixture(params=FAMILIES)
def verifier(request: pytest.FixtureRequest) -> CausalVerifier:
    return tiny_verifier_of(request.param)


def test_taps_are_the_residual_stream_in_every_depth(verifier: CausalVerifier) -> None:
    """Tap i equals hidden_states[i]; the last tap is the stream before the final norm, whose norm is `final`."""
    tokens = torch.arange(5, 35)
    outputs = verifier.model(tokens[None], output_hidden_states=True, use_cache=False)
    states = verifier.states([tokens], range(LAYERS + 1))[0]
    for tap in range(LAYERS):
        torch.testing.assert_close(states.taps[:, tap], outputs.hidden_states[tap][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(verifier.model.get_decoder().norm(states.taps[:, LAYERS]), states.final)
    torch.testing.assert_close(verifier.logits(states.final), outputs.logits[0], rtol=1e-4, atol=1e-4)


def test_targets_go_through_norm_and_soft_cap(verifier: CausalVerifier) -> None:
    """With a final norm of 3 (and a cap where the family has one) our logits are still the verifier's own."""
    with torch.no_grad():
        verifier.model.get_decoder().norm.weight.fill_(3.0)
    tokens = torch.arange(5, 25)
    wanted = verifier.model(tokens[None], use_cache=False).logits[0]
    got = verifier.logits(verifier.states([tokens], [])[0].final)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    if verifier.logit_softcap:
        assert float(got.abs().max()) <= verifier.logit_softcap


def test_same_row_alone_in_a_batch_and_after_a_shared_prefix(verifier: CausalVerifier) -> None:
    base = torch.arange(3, 53)
    rows = [torch.cat([base, torch.tensor([60 + i, 70, 5 + i][: 1 + i % 3])]) for i in range(4)]
    batch = verifier.states(rows, [1, 3])
    for row, together in zip(rows, batch, strict=True):
        alone = verifier.states([row], [1, 3])[0]
        torch.testing.assert_close(together.taps, alone.taps, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(together.final, alone.final, rtol=1e-4, atol=1e-5)


def test_cached_steps_with_rollback_equal_one_pass(verifier: CausalVerifier) -> None:
    """Two rows advance by different counts; what was rejected leaves no trace; windows hold."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 96, (2, 40), generator=generator)
    whole = [verifier.states([row], [2])[0] for row in tokens]
    cache, at = verifier.cache(2), [0, 0]
    for counts in ([3, 1], [0, 4], [4, 4], [1, 0], [2, 4], [4, 3]):
        step = torch.stack([tokens[r, at[r] : at[r] + 4] for r in range(2)])
        states = verifier.extend(cache, step, [2])
        for r in range(2):
            torch.testing.assert_close(states.final[r], whole[r].final[at[r] : at[r] + 4], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states.taps[r], whole[r].taps[at[r] : at[r] + 4], rtol=1e-4, atol=1e-5)
        cache.kv.commit(torch.tensor(counts))
        at = [a + c for a, c in zip(at, counts, strict=True)]


def test_a_family_that_scales_its_logits_unannounced_is_rejected() -> None:
    model = tiny_model("llama")
    original = model.forward
    model.forward = lambda *args, **kwargs: _scaled(original(*args, **kwargs))
    with pytest.raises(InputError, match="logits in one pass differ from the model's own by"):
        CausalVerifier(model, tiny_tokenizer(), "scaled").prove()


def _scaled(output):
    output.logits = output.logits * 0.5
    return output


def test_head_bias_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Linear(32, 128, bias=True)
    with pytest.raises(InputError, match="bias"):
        CausalVerifier(model, tiny_tokenizer(), "biased")


def test_identity_tells_sisters_apart_but_not_dtypes() -> None:
    a, b = tiny_verifier_of("llama"), tiny_verifier_of("llama", torch.bfloat16)
    assert a.identity == b.identity
    sister = tiny_model("llama")
    with torch.no_grad():
        sister.model.layers[1].input_layernorm.weight[3] = 1.5
    assert CausalVerifier(sister, tiny_tokenizer(), "tiny-llama").identity.norms_hash != a.identity.norms_hash


def test_shape_is_read_not_derived() -> None:
    shape = tiny_verifier_of("llama").layer_shape()
    assert (shape.head_dim, shape.num_heads, shape.num_kv_heads) == (16, 4, 2)  # 32 / 4 would be 8


def test_nested_rope_is_flattened() -> None:
    rope = tiny_verifier_of("gemma3").rope_parameters()
    assert rope["rope_theta"] == 1_000_000.0 and "full_attention" not in rope
