"""The digest of a verifier's matrices: a few rows of each, rounded to bfloat16.

It tells a fine-tune from its base where the norms do not: one that was merged from low-rank adapters keeps every norm
and changes every row of the matrices it touches. A float32, bfloat16 or resharded copy has the same digest.

What is sampled: every matrix of the decoder (of both text sides where there is an encoder), the embedding and the
output head, as transformers names them once loaded. Two rows of a matrix, eight of a stack of matrices (experts),
spread evenly. What is not caught: an edit of single rows or experts between those, and biases.

Files may hold the same numbers under other names and in other pieces (an expert a tensor). transformers' own conversion
says which; it is applied to row numbers instead of rows.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from blockdraft.verifiers.tensor_files import DTYPES, Stored, read_rows

MATRIX_ROWS, STACK_ROWS = 2, 8
Place = tuple[Stored, int]


def sampled_rows(shape: Iterable[int]) -> list[int]:
    """Which rows of a tensor, seen as a matrix, are in the digest."""
    *outer, _ = shape
    count, wanted = math.prod(outer), MATRIX_ROWS if len(outer) == 1 else STACK_ROWS
    return sorted({(2 * i + 1) * count // (2 * wanted) for i in range(wanted)})


def matrices_of(model: Any) -> dict[str, Tensor]:
    """A model's matrices that say which verifier it is, by name, in the model's own order."""
    parts: list[nn.Module] = [model.get_decoder(), model.get_input_embeddings()]
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        parts.append(model.get_output_embeddings())
    if model.config.is_encoder_decoder:
        parts.append(model.get_encoder().text_model)
    chosen = {id(parameter) for part in parts for parameter in part.parameters()}
    return {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.numel() and id(p) in chosen}


def is_quantized(config: Any) -> bool:
    """Whether a config says that weights are not plain numbers. A GGUF file's are, once unpacked."""
    stated = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if stated is None:
        return False
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    return str(getattr(method, "value", method)) != "gguf"


def digest_of_model(model: Any) -> str | None:
    """The digest of a loaded model, in any dtype and on any device; None where its matrices are quantized."""
    matrices = matrices_of(model)
    if is_quantized(model.config) or any(p.dtype not in DTYPES.values() for p in matrices.values()):
        return None
    return _digest((tuple(p.shape), p.detach().flatten(0, -2)[sampled_rows(p.shape)].cpu()) for p in matrices.values())


def digest_of_files(model: Any, found: Mapping[str, list[Place]]) -> str | None:
    """The digest of a model without weights whose rows lie in files; None where they cannot be compared.

    Args:
        found: by name of a matrix, where its sampled rows are (`Layout.places`).
    """
    matrices = matrices_of(model)
    places = [place for name in matrices for place in found.get(name, [])]
    if is_quantized(model.config) or any(not found.get(name) for name in matrices):
        return None
    if any(stored.dtype not in DTYPES for stored, _ in places):
        return None
    rows = iter(read_rows(places))
    return _digest((tuple(p.shape), torch.stack([next(rows) for _ in found[name]])) for name, p in matrices.items())


def _digest(sampled: Iterable[tuple[tuple[int, ...], Tensor]]) -> str:
    total = hashlib.sha256()
    for shape, rows in sampled:
        total.update(str(shape).encode())
        total.update(rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return total.hexdigest()[:16]


class Layout:
    """How the tensors of files make up a model's parameters.

    Args:
        model: without weights.
        stored: tensors by their names in the files.
    """

    def __init__(self, model: Any, stored: Mapping[str, Stored]) -> None:
        self._model, self._stored = model, stored
        self._own: dict[str, Tensor] = dict(model.named_parameters())
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        states = model.state_dict()
        for source in sorted(stored, key=_natural):
            target, pattern = rename_source_key(source, renamings, self._converters, model.base_model_prefix, states)
            self._sources.setdefault(target, []).append((source, pattern))

    def places(self, name: str, rows: Iterable[int]) -> list[Place]:
        """Where rows of a parameter lie; empty where the files do not have it, or not row by row."""
        sources = self._sources.get(name, [])
        shape = self._own[name].shape
        if len(sources) == 1 and sources[0][1] is None:
            stored = self._stored[sources[0][0]]
            return [(stored, row) for row in rows] if stored.shape == shape else []
        numbers = self._row_numbers(name) if sources else None
        if numbers is None or numbers.shape[:-1] != shape[:-1]:
            return []
        every = [(self._stored[source], row) for source, _ in sources for row in range(self._stored[source].num_rows)]
        chosen = [every[int(numbers.flatten()[row])] for row in rows]
        return chosen if all(stored.shape[-1] == shape[-1] for stored, _ in chosen) else []

    def stored_under(self, name: str) -> list[tuple[str, Stored]]:
        """What the files hold for a parameter, or under the name of the module that owns it, by the files' names."""
        exact = [(source, self._stored[source]) for source, _ in self._sources.get(name, [])]
        owner = name.rpartition(".")[0] + "."
        return exact or [
            (source, self._stored[source])
            for target, sources in self._sources.items()
            if target.startswith(owner)
            for source, _ in sources
        ]

    def is_plain(self, name: str) -> bool:
        """Whether the files hold a parameter as one tensor of its own numbers."""
        sources = self._sources.get(name, [])
        return len(sources) == 1 and sources[0][1] is None

    def _row_numbers(self, name: str) -> Tensor | None:
        """The model's parameter with each row replaced by its number among the rows of its sources, [..., 1]."""
        by_pattern: dict[str | None, WeightConverter] = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        converter: Any = copy.deepcopy(by_pattern.get(self._sources[name][0][1]))
        if converter is None:
            return None
        first = 0
        for source, pattern in self._sources[name]:
            stored = self._stored[source]
            numbers = torch.arange(first, first + stored.num_rows).view(*stored.shape[:-1], 1)
            converter.add_tensor(name, source, pattern, numbers)
            first += stored.num_rows
        try:
            made: Any = converter.convert(name, model=self._model, config=self._model.config)[name]
        except (KeyError, IndexError, ValueError, TypeError, RuntimeError):  # not a matter of whole rows
            return None
        return made[0] if isinstance(made, list) else made


def _natural(name: str) -> list[tuple[int, str]]:
    """Experts in the order of their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
