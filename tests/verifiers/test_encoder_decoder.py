"""The in-process T5Gemma 2 against transformers' own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockdraft.errors import InputError
from blockdraft.verifiers.encoder_decoder import EncoderDecoderVerifier
from blockdraft.verifiers.identity import read_identity
from blockdraft.verifiers.loading import load_verifier, save_folder
from conftest import BOI, EOI, IMAGE, LAYERS, VOCAB, tiny_encoder_decoder, tiny_tokenizer

SOURCES = [list(range(5, 5 + length)) for length in (23, 1, 9)]  # longer and shorter than the windows of 4


def own_outputs(verifier: EncoderDecoderVerifier, source: list[int], tokens: torch.Tensor):
    return verifier.model(
        input_ids=torch.tensor([source]), decoder_input_ids=tokens[None], output_hidden_states=True, use_cache=False
    )


def test_taps_are_the_decoders_residual_stream_in_every_depth(tiny_seq2seq: EncoderDecoderVerifier) -> None:
    """Tap i equals decoder_hidden_states[i]; the last one is raw, and decoder.norm makes `final` of it."""
    tokens = torch.arange(5, 35)
    for source in SOURCES:
        outputs = own_outputs(tiny_seq2seq, source, tokens)
        (states,) = tiny_seq2seq.states([tokens], range(LAYERS + 1), [source])
        for tap in range(LAYERS):
            torch.testing.assert_close(states.taps[:, tap], outputs.decoder_hidden_states[tap][0], rtol=1e-4, atol=1e-4)
        norm = tiny_seq2seq.model.model.decoder.norm
        torch.testing.assert_close(norm(states.taps[:, LAYERS]), states.final)
        torch.testing.assert_close(tiny_seq2seq.logits(states.final), outputs.logits[0], rtol=1e-4, atol=1e-4)
        assert tiny_seq2seq.logit_softcap == 5.0


def test_a_row_does_not_depend_on_its_batch(tiny_seq2seq: EncoderDecoderVerifier) -> None:
    rows = [torch.arange(3, 3 + length) for length in (17, 30, 2)]
    for row, source, together in zip(rows, SOURCES, tiny_seq2seq.states(rows, [1, 3], SOURCES), strict=True):
        (alone,) = tiny_seq2seq.states([row], [1, 3], [source])
        torch.testing.assert_close(together.taps, alone.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.final, alone.final, rtol=1e-4, atol=1e-4)


def test_cached_steps_with_rollback_equal_one_pass(tiny_seq2seq: EncoderDecoderVerifier) -> None:
    """Rows advance by different counts past the window, what was rejected leaves no trace, and a row leaves."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 96, (3, 40), generator=generator)
    whole = tiny_seq2seq.states(list(tokens), [2], SOURCES)
    cache, at, rows = tiny_seq2seq.cache(3, SOURCES), [0, 0, 0], [0, 1, 2]
    for counts in ([3, 1, 2], [0, 4, 4], [4, 4, 0], [1, 0], [2, 4], [4, 3]):
        if len(counts) < len(rows):
            cache.keep_rows(torch.tensor([0, 2]))
            rows = [0, 2]
        step = torch.stack([tokens[r, at[r] : at[r] + 4] for r in rows])
        states = tiny_seq2seq.extend(cache, step, [2])
        for place, r in enumerate(rows):
            span = slice(at[r], at[r] + 4)
            torch.testing.assert_close(states.final[place], whole[r].final[span], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(states.taps[place], whole[r].taps[span], rtol=1e-4, atol=1e-4)
        cache.kv.commit(torch.tensor(counts))
        for r, count in zip(rows, counts, strict=True):
            at[r] += count


def test_a_draft_sees_scaled_embeddings_and_the_image_end_row(tiny_seq2seq: EncoderDecoderVerifier) -> None:
    table = tiny_seq2seq.model.model.decoder.embed_tokens
    ids = torch.tensor([[7, EOI], [EOI, 9]])
    seen = tiny_seq2seq.embed(ids)
    torch.testing.assert_close(seen[0, 0], table.weight[7] * 32**0.5)
    assert torch.equal(seen[0, 1], table.eoi_embedding) and not torch.equal(table.eoi_embedding, torch.zeros(32))
    assert tiny_seq2seq.identity.embedding == "module"


def test_another_source_is_another_text(tiny_seq2seq: EncoderDecoderVerifier) -> None:
    tokens = torch.arange(5, 15)
    first, second = tiny_seq2seq.states([tokens, tokens], [], [SOURCES[0], SOURCES[0][::-1]])
    assert not torch.allclose(first.final, second.final, atol=1e-2)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt 4: empty"),
        ([5] * 65, "prompt 4: 65 tokens: the verifier's encoder reads 64"),
        ([5, IMAGE], f"prompt 4: token {IMAGE} .*stands for an image; only text is supported"),
        ([BOI, 5], "stands for an image"),
        ([EOI], "stands for an image"),
        ([5, VOCAB], f"prompt 4: token {VOCAB}: the verifier has tokens 0 to {VOCAB - 1}"),
        ([-1], "token -1"),
    ],
)
def test_what_the_encoder_cannot_read_is_refused(
    tiny_seq2seq: EncoderDecoderVerifier, prompt: list[int], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        tiny_seq2seq.sides(prompt, "prompt 4")
    assert tiny_seq2seq.sides([5] * 64, "prompt 4").decoder == [2]


def test_a_decoder_that_begins_with_nothing_is_rejected() -> None:
    verifier = tiny_encoder_decoder()
    config, tokenizer = verifier.model.config, verifier.tokenizer
    for start, says in ((None, "None"), (VOCAB, str(VOCAB)), (-1, "-1")):
        config.decoder.bos_token_id = start
        with pytest.raises(InputError, match=f"decoder_start_token_id: {says}: a decoder's text begins with"):
            EncoderDecoderVerifier(verifier.model, tokenizer, "x")
    verifier.model.generation_config.decoder_start_token_id = 7
    assert EncoderDecoderVerifier(verifier.model, tokenizer, "x").decoder_start == 7


def test_a_model_that_computes_something_else_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = tiny_encoder_decoder()
    monkeypatch.setattr(EncoderDecoderVerifier, "_encoder_window", verifier._encoder_window + 2)
    with pytest.raises(InputError, match="differ from the model's own by"):
        verifier.prove()


def test_folder_round_trip_and_identity_without_loading(tmp_path: Path) -> None:
    verifier = tiny_encoder_decoder()
    save_folder(verifier, tmp_path / "v")
    again = load_verifier(str(tmp_path / "v"), torch.float32)
    assert isinstance(again, EncoderDecoderVerifier)
    read, softcap = read_identity(str(tmp_path / "v"))
    for name in read.COMPARED:
        assert getattr(read, name) == getattr(again.identity, name) == getattr(verifier.identity, name)
    assert softcap == verifier.logit_softcap
    sister = tiny_encoder_decoder().model
    with torch.no_grad():
        sister.model.decoder.norm.weight[3] += 1.5
    changed = EncoderDecoderVerifier(sister, tiny_tokenizer(), "sister").identity
    assert changed.norms_hash != verifier.identity.norms_hash


def test_half_precision_is_driven_too() -> None:
    verifier = tiny_encoder_decoder(torch.bfloat16)
    assert verifier.dtype == torch.bfloat16
    ids = torch.tensor([7])
    assert torch.equal(verifier.embed(ids), verifier.model.model.decoder.embed_tokens(ids))
