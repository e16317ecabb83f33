"""Training and validation documents, divided by content, so that the division survives added or reordered rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from blockdraft.errors import InputError
from blockdraft.records import Document


def split_documents(documents: Sequence[Document], train_ratio: float) -> tuple[list[Document], list[Document]]:
    """Documents whose content hash falls under `train_ratio` train, the others validate.

    Equal documents fall on the same side. Where chance leaves a side empty, the document nearest to the boundary
    changes sides; fewer than two documents with different content are refused.
    """
    places = sorted((_place(document), index) for index, document in enumerate(documents))
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
    return [documents[i] for i in train], [documents[i] for i in validation]


def _place(document: Document) -> float:
    digest = hashlib.sha256(repr(list(document.input_ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
