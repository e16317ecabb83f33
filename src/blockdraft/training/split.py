"""Training and validation documents, divided by what they ask: added or reordered rows move no other."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.data.mixture import place
from blockdraft.data.table import Documents
from blockdraft.errors import InputError
from blockdraft.records import Document


def split_documents(documents: Sequence[Document], train_ratio: float) -> tuple[Sequence[Document], Sequence[Document]]:
    """Documents that stand under `train_ratio` train, the others validate (`data.mixture.place`).

    Where chance leaves a side empty, the document nearest to the boundary changes sides; fewer than two documents that
    ask different things are refused.
    """
    places = sorted((place(_asked(document)), index) for index, document in enumerate(documents))
    if len({place for place, _ in places}) < 2:
        raise InputError(
            "--data-path", f"{len(documents)} documents", "needs two different ones: to train, to validate"
        )
    boundary = train_ratio
    if places[0][0] >= boundary:
        boundary = next(place for place, _ in places if place > places[0][0])
    elif places[-1][0] < boundary:
        boundary = places[-1][0]
    train = sorted(index for place, index in places if place < boundary)
    validation = sorted(index for place, index in places if place >= boundary)
    return _chosen(documents, train), _chosen(documents, validation)


def joined(train: Sequence[Document], validation: Sequence[Document]) -> Sequence[Document]:
    """One side behind the other."""
    if isinstance(train, Documents) and isinstance(validation, Documents):
        return train.joined(validation)
    return [*train, *validation]


def _asked(document: Document) -> str:
    """What tells documents apart: the request, or all of it where none is known."""
    return document.key or repr(document.input_ids)


def _chosen(documents: Sequence[Document], indices: list[int]) -> Sequence[Document]:
    return documents.select(indices) if isinstance(documents, Documents) else [documents[i] for i in indices]
