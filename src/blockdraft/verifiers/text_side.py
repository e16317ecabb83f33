"""The verifier's side of text: its tokenizer and what ends a reply, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from blockdraft.digests import digest_of
from blockdraft.errors import InputError
from blockdraft.verifiers.encoder_decoder import decoder_start, image_ids
from blockdraft.verifiers.hub import is_gguf, require_hub_id, unreadable
from blockdraft.verifiers.identity import has_encoder, stop_ids_of, tokenizer_hash
from blockdraft.verifiers.loading import gguf_tokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """A tokenizer and what is known beside it.

    Attributes:
        stop_ids: tokens that end a reply.
        start_id: first token of the decoder, where the verifier has an encoder.
        image_ids: tokens that stand for images, which no text may hold.
    """

    tokenizer: Any
    stop_ids: frozenset[int]
    start_id: int | None
    image_ids: frozenset[int] = frozenset()

    def facts(self) -> dict[str, Any]:
        """What prepared data depend on."""
        return {
            "tokenizer": tokenizer_hash(self.tokenizer),
            "chat_template": digest_of(getattr(self.tokenizer, "chat_template", None)),
            "stop_ids": sorted(self.stop_ids),
            "start_id": self.start_id,
        }


def read_text_side(name_or_path: str, trust_remote_code: bool = False, revision: str | None = None) -> TextSide:
    """Tokenizer, stop tokens and kind of a verifier.

    Raises:
        InputError: nothing there, or not readable.
    """
    require_hub_id(name_or_path, revision)
    if is_gguf(name_or_path):
        tokenizer = gguf_tokenizer(name_or_path)
        return TextSide(tokenizer, stop_ids_of(None, tokenizer), None)
    if name_or_path.startswith((".", "/", "~")) and not (Path(name_or_path) / "config.json").is_file():
        raise InputError("--verifier-name-or-path", name_or_path, "no model folder there (config.json is missing)")
    origin: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(name_or_path, **origin)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **origin)
    except Exception as error:  # whatever the hub's client or the readers raise
        raise unreadable(name_or_path, error) from error
    try:
        generation = GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")
    except OSError:  # a model without one
        generation = config
    stops = stop_ids_of(generation, tokenizer)
    if not has_encoder(config):
        return TextSide(tokenizer, stops, None)
    named = getattr(generation, "decoder_start_token_id", None)
    return TextSide(tokenizer, stops, decoder_start(config, named), image_ids(config))
