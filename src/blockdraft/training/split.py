"""Training and validation examples, divided by what they ask: added or reordered rows move no other."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.data.mixture import place
from blockdraft.data.table import Examples
from blockdraft.errors import InputError
from blockdraft.records import Example


def split_examples(examples: Sequence[Example], train_ratio: float) -> tuple[Sequence[Example], Sequence[Example]]:
    """Examples that stand under `train_ratio` train, the others validate (`data.mixture.place`).

    Where chance leaves a side empty, the example nearest to the boundary changes sides; fewer than two examples that
    ask different things are rejected.
    """
    places = sorted((place(_asked(example)), index) for index, example in enumerate(examples))
    if len({place for place, _ in places}) < 2:
        raise InputError("--data-path", f"{len(examples)} examples", "needs two different ones: to train, to validate")
    boundary = train_ratio
    if places[0][0] >= boundary:
        boundary = next(place for place, _ in places if place > places[0][0])
    elif places[-1][0] < boundary:
        boundary = places[-1][0]
    train = sorted(index for place, index in places if place < boundary)
    validation = sorted(index for place, index in places if place >= boundary)
    return _chosen(examples, train), _chosen(examples, validation)


def joined(train: Sequence[Example], validation: Sequence[Example]) -> Sequence[Example]:
    """One side behind the other."""
    if isinstance(train, Examples) and isinstance(validation, Examples):
        return train.joined(validation)
    return [*train, *validation]


def _asked(example: Example) -> str:
    """What tells examples apart: the request, or all of it where none is known."""
    return example.key or repr(example.input_ids)


def _chosen(examples: Sequence[Example], indices: list[int]) -> Sequence[Example]:
    return examples.select(indices) if isinstance(examples, Examples) else [examples[i] for i in indices]
