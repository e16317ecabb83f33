"""Stop strings end a reply at the token at which its text, decoded from the start, has one for the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blockdraft.decoding.stops import StopRules, StopWindow
from blockdraft.verifiers.causal import CausalVerifier
from conftest import tiny_tokenizer

Decode = Callable[[list[int]], str]
LIMIT = 10_000


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte, and words and parts of characters, as GPT-2 spells them."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [spell.pre_tokenize_str(word)[0][0] for word in (" the", "the", "\n\n", " do", "n't", "é", "😀", "好的")]
    halves = [word[:2] for word in words[-2:]]
    return _of_words([*alphabet, *words, *halves], decoders.ByteLevel())


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with their spaces, and bytes for what is no word, as Llama 2 has them."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words = ["▁", "▁the", "the", "▁do", "n't", "▁é", "."]
    return _of_words([*words, *(f"<0x{byte:02X}>" for byte in range(256))], decoders.Sequence(steps))


def word_pieces() -> PreTrainedTokenizerFast:
    """Words and their continuations, with spaces cleaned up."""
    return _of_words(["the", "do", "n't", "n", "'", "t", ".", "##ing", "##s", "not"], decoders.WordPiece(cleanup=True))


def _of_words(words: Sequence[str], decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    every = {word: index for index, word in enumerate(dict.fromkeys([*words, "<end>"]))}
    backend = Tokenizer(models.WordLevel(every, unk_token="<end>"))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


TOKENIZERS = {make.__name__: make() for make in (tiny_tokenizer, byte_level, byte_fallback, word_pieces)}


def byte_level_ids(text: str) -> list[int]:
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return TOKENIZERS["byte_level"].convert_tokens_to_ids(list(spelled))


def byte_fallback_ids(text: str) -> list[int]:
    return TOKENIZERS["byte_fallback"].convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])


def first_stop(decode: Decode, tokens: list[int], stops: tuple[str, ...]) -> int | None:
    """The reference: after how many tokens the text, decoded from the start, has a stop string."""
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if any(stop in decode(tokens[:end]) for stop in stops)), None)


def found_stop(decode: Decode, tokens: list[int], stops: tuple[str, ...], window: StopWindow) -> int | None:
    rules = StopRules(frozenset(), stops, decode)
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if rules.reason(tokens[:end], LIMIT, window) == "stop"), None)


@st.composite
def replies(draw: st.DrawFn, ids: Sequence[int]) -> list[int]:
    """Few different tokens, repeated: parts of characters meet, and stop strings nearly match."""
    few = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=6))
    return draw(st.lists(st.one_of(st.sampled_from(few), st.sampled_from(ids)), min_size=1, max_size=120))


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Pieces of the text, mostly late ones, and some that it may not have."""
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        end = draw(st.integers(0, len(text)))
        piece = text[max(0, end - draw(st.integers(1, 12))) : end]
        pieces.append(piece + draw(st.sampled_from(["", "", "\ufffd", " ", "x"])))
    stray = draw(st.sampled_from([(), ("##",), ("\ufffd",)]))  # what only a window that starts badly may have
    return tuple(piece for piece in pieces if piece) + stray or ("x",)


def require_the_same(decode: Decode, tokens: list[int], data: st.DataObject) -> None:
    stops = data.draw(stop_strings(decode(tokens)))
    assert found_stop(decode, tokens, stops, StopWindow()) == first_stop(decode, tokens, stops), stops


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_stop_string_is_found_as_by_decoding_from_the_start(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Rows that no word has decode to nothing, as those of a padded vocabulary do.
    tokens = data.draw(replies(range(len(tokenizer) + 5)))
    require_the_same(lambda ids: tokenizer.decode(ids), tokens, data)


@pytest.mark.real
@settings(max_examples=60)
@given(data=st.data())
def test_a_stop_string_is_found_in_a_real_tokenizers_text(real_verifier: CausalVerifier, data: st.DataObject) -> None:
    tokenizer = real_verifier.tokenizer
    some = tokenizer.encode("The users' café, naïve: 好的 😀👩‍👩‍👧 – don't\n\n```py\nprint('ok')\n```<|im_end|>")
    tokens = data.draw(replies([*some, *range(0, len(tokenizer), 997)]))
    require_the_same(lambda ids: tokenizer.decode(ids), tokens, data)


@pytest.mark.parametrize(("name", "spelled"), [("byte_level", byte_level_ids), ("byte_fallback", byte_fallback_ids)])
@pytest.mark.parametrize("character", ["é", "好", "😀"])
def test_the_window_never_starts_inside_a_character(
    name: str, spelled: Callable[[str], list[int]], character: str
) -> None:
    """With bytes alone, half of the starts would be inside one, and all that follows could decode to something else."""
    tokenizer, stops = TOKENIZERS[name], (character + ".",)
    for number in range(5, 60):
        tokens = spelled(character * number + ".")
        window = StopWindow()
        assert found_stop(lambda ids: tokenizer.decode(ids), tokens, stops, window) == len(tokens)
    assert window.start > 0


def test_the_window_never_shows_what_the_text_does_not() -> None:
    """A continuation is spelled with its marks where nothing is before it."""
    tokenizer = TOKENIZERS["word_pieces"]
    tokens = tokenizer.convert_tokens_to_ids(["the", *["##ing"] * 100])
    assert found_stop(lambda ids: tokenizer.decode(ids), tokens, ("##",), StopWindow()) is None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_window_moves_with_a_long_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    words = [index for word, index in tokenizer.get_vocab().items() if word in ("the", "not", "n't", ".", "w1", "w20")]
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return tokenizer.decode(ids)

    window = StopWindow()
    assert found_stop(decode, (words * 600)[:600], ("never",), window) is None
    assert max(sizes) < 60 and window.start > 500
