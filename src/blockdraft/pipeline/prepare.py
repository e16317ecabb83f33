"""`blockdraft prepare`: sources to a data folder, which appears when it is complete; or a preview of one."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blockdraft.data.encoding import Encoder
from blockdraft.data.preparation import Preparation
from blockdraft.data.readers import pinned, source_digest
from blockdraft.data.record import read_record
from blockdraft.data.sources import Source, parse_sources
from blockdraft.data.table import RECORD, REJECTS
from blockdraft.data.templates import ChatMode, ChatTemplate
from blockdraft.digests import already_made, file_digest
from blockdraft.errors import InputError
from blockdraft.files import locked, read_json, replacing, require_free, write_json
from blockdraft.settings import PrepareSettings
from blockdraft.verifiers.text_side import TextSide, read_text_side

FORMAT = 1  # of the data folder; part of what determines a result
ENCODER_LENGTH, DECODER_LENGTH = 1024, 2048  # default limits of a text, with an encoder before it and without


def prepare(settings: PrepareSettings) -> dict[str, Any]:
    """Make a data folder, or a preview of one."""
    sources = [pinned(source) for source in parse_sources(settings.source, settings.converter)]
    text_side = read_text_side(settings.verifier_name_or_path, settings.trust_remote_code, settings.revision)
    facts = _facts(settings, sources, text_side)
    if settings.preview:
        return _preview(settings, sources, text_side, _encoder(facts, text_side))
    assert settings.save_path is not None
    made = made_before(settings.save_path, facts)
    if made is not None:
        return made
    with locked(settings.save_path, "--save-path"):
        return made_before(settings.save_path, facts) or _made(settings, sources, text_side, facts, settings.save_path)


def made_before(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a folder that holds the data of these facts; None where nothing was made.

    Raises:
        InputError: it holds the data of other facts.
    """
    if not already_made(folder / RECORD, facts, "--save-path"):
        return None
    return {**read_record(folder, "--save-path"), "folder": str(folder)}


def _made(
    settings: PrepareSettings, sources: Sequence[Source], text_side: TextSide, facts: dict[str, Any], save_path: Path
) -> dict[str, Any]:
    require_free(save_path, "--save-path")
    with replacing(save_path) as folder, _rejects_kept(save_path, folder):
        record = {"facts": facts, **Preparation(settings, sources, _encoder(facts, text_side), folder).run()}
        write_json(folder / RECORD, record)
    return {**record, "folder": str(save_path)}


def chat_template(text_side: TextSide, facts: dict[str, Any]) -> ChatTemplate:
    """The template of a verifier as prepared data record it.

    Raises:
        InputError: the tokenizer has neither a template nor a token that ends a text.
    """
    tokenizer = text_side.tokenizer
    if getattr(tokenizer, "chat_template", None) is None and tokenizer.eos_token_id is None:
        raise InputError(
            "--verifier-name-or-path", tokenizer.name_or_path, "its tokenizer has neither a chat template nor an "
            "end-of-text token; set eos_token in its tokenizer_config.json",
        )  # fmt: skip
    return ChatTemplate(
        text_side.tokenizer,
        text_side.stop_ids,
        text_side.start_id,
        chat_mode(facts),
        facts["rewritten_history"],
    )


def chat_mode(facts: dict[str, Any]) -> ChatMode:
    """What the template was told, as prepared data record it."""
    return ChatMode(facts["thinking"], tuple(facts["tools"]))


def _tools(path: Path | None) -> list[Any]:
    if path is None:
        return []
    tools = read_json(path, "--tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError("--tools", path, "must be a JSON list of tools")
    return tools


def length_limit(max_length: int, text_side: TextSide) -> int:
    """The limit of a text, or its default."""
    return max_length or (DECODER_LENGTH if text_side.start_id is None else ENCODER_LENGTH)


def _facts(settings: PrepareSettings, sources: Sequence[Source], text_side: TextSide) -> dict[str, Any]:
    """Everything that determines the result, and nothing else."""
    return {
        "format": FORMAT,
        "sources": {
            source.name: {
                "content": source_digest(source),
                "revision": source.revision,
                "split": source.split,
                "count": source.count,
                "weight": source.weight,
                "converter": source.converter,
            }
            for source in sources
        },
        "excluded": sorted(file_digest(path, "--exclude-overlap") for path in settings.exclude_overlap),
        **text_side.facts(),
        "max_length": length_limit(settings.max_length, text_side),
        "tools": _tools(settings.tools),
        **{
            name: getattr(settings, name)
            for name in (
                "prompts_only", "num_rows", "train_data_ratio", "thinking", "rewritten_history", "max_source_length",
                "overlong", "seed",
            )
        },
    }  # fmt: skip


def _encoder(facts: dict[str, Any], text_side: TextSide) -> Encoder:
    return Encoder(
        chat_template(text_side, facts),
        facts["max_source_length"],
        facts["max_length"],
        facts["overlong"] == "drop",
        facts["prompts_only"],
        text_side.image_ids,
    )


@contextlib.contextmanager
def _rejects_kept(save_path: Path, folder: Path) -> Iterator[None]:
    """Where a run stops over its rows, leave the list of bad ones beside the folder that is not made."""
    beside = save_path.with_name(f"{save_path.name}.{REJECTS}")
    try:
        yield
    except InputError as error:
        if (folder / REJECTS).is_file() and (folder / REJECTS).stat().st_size:
            shutil.copyfile(folder / REJECTS, beside)
            raise InputError(error.field, error.value, f"{error.hint}; every bad row is named in {beside}") from None
        raise
    beside.unlink(missing_ok=True)


def _preview(
    settings: PrepareSettings, sources: Sequence[Source], text_side: TextSide, encoder: Encoder
) -> dict[str, Any]:
    """Texts of each source in pieces of text, the supervised ones marked."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        sample = Preparation(settings, sources, encoder, Path(name)).sample(settings.preview)
        tokenizer = text_side.tokenizer
        return {
            "preview": [
                {
                    "source": source.name,
                    "reads": None if text["source_ids"] is None else tokenizer.decode(text["source_ids"]),
                    "pieces": _pieces(tokenizer, text["input_ids"], text["targets"]),
                    "tokens": len(text["input_ids"]),
                }
                for source, texts in sample
                for text in texts
            ]
        }


def _pieces(tokenizer: Any, ids: list[int], targets: list[int]) -> list[tuple[str, bool]]:
    bounds = [0, *targets, len(ids)]
    parts = [(ids[a:b], bool(i % 2)) for i, (a, b) in enumerate(itertools.pairwise(bounds))]
    return [(tokenizer.decode(part), supervised) for part, supervised in parts if part]
