"""Which rows are taken: no duplicates, nothing of an evaluation file, exact counts, an order that follows the seed.

Rows are known by digests; their order is that of a digest of seed and content, not of their place in a file. So the same
rows come out wherever they stand, and rows that are added leave the others on their side of the split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from blockdraft.data.sources import Source
from blockdraft.errors import InputError


class Hashes(Sequence[str]):
    """Hashes of 32 hex digits, 16 bytes each."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        for each in hashes:
            self.append(each)

    def append(self, hash: str) -> None:
        """Add one."""
        self._bytes += bytes.fromhex(hash)

    def __len__(self) -> int:
        return len(self._bytes) // 16

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Hashes: ...
    def __getitem__(self, index: int | slice) -> str | Hashes:
        if isinstance(index, slice):
            return Hashes(self[i] for i in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._bytes[16 * index : 16 * index + 16].hex()


def place(key: str) -> float:
    """Where a text stands between 0 and 1, by the digest of what it asks: under the share of training it trains.

    Equal questions stand at the same place, and texts that are added move no other.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def first_occurrences(keys: Iterable[str]) -> NDArray[np.bool_]:
    """True where a key (32 hex digits) occurs for the first time."""
    packed = np.frombuffer(b"".join(bytes.fromhex(key) for key in keys), dtype="V16")
    first = np.zeros(len(packed), dtype=bool)
    if len(packed):
        first[np.unique(packed, return_index=True)[1]] = True
    return first


def ranks(keys: Iterable[str], seed: int) -> NDArray[np.uint64]:
    """A number for every row by seed and key; sorting by it shuffles."""
    digests = (hashlib.blake2b(key.encode(), digest_size=8, key=str(seed).encode()).digest() for key in keys)
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def wanted_counts(sources: Sequence[Source], available: Sequence[int], num_rows: int) -> list[int]:
    """Rows to take of every source.

    A count is taken as it is; weights share what `num_rows` leaves, or as much as the scarcest source allows; a source
    with neither gives all it has, or its share of `num_rows` in proportion to what it has.

    Raises:
        InputError: a source has fewer usable rows than are asked of it.
    """
    counts = [source.count or 0 for source in sources]
    if num_rows and sum(counts) != num_rows and all(source.count is not None for source in sources):
        raise InputError("--num-rows", num_rows, f"the sources' own counts make {sum(counts)}; leave one out")
    open_ones = [i for i, source in enumerate(sources) if source.count is None]
    weighted = [i for i in open_ones if sources[i].weight is not None]
    if open_ones and (weighted or num_rows):
        if weighted and len(weighted) < len(open_ones):
            bare = next(sources[i].name for i in open_ones if sources[i].weight is None)
            raise InputError("--source", bare, "has neither a count nor a weight, while others have weights")
        weights = [sources[i].weight if weighted else available[i] for i in open_ones]
        total = sum(weight or 0 for weight in weights)
        shares = [(weight or 0) / (total or 1) for weight in weights]
        rest = num_rows - sum(counts)
        if not num_rows:
            rest = min(int(available[i] / share) for i, share in zip(open_ones, shares, strict=True))
        if rest < len(open_ones):
            raise InputError("--num-rows", num_rows, f"leaves no row for {sources[open_ones[0]].name}; ask for more")
        for i, amount in zip(open_ones, _largest_remainder(shares, rest), strict=True):
            counts[i] = amount
    else:
        for i in open_ones:
            counts[i] = available[i]
    for source, count, there in zip(sources, counts, available, strict=True):
        if count > there:
            raise InputError("--source", source.name, f"{count} rows asked for, {there} usable; ask for fewer")
    return counts


def _largest_remainder(shares: list[float], total: int) -> list[int]:
    exact = [share * total for share in shares]
    amounts = [int(amount) for amount in exact]
    order = sorted(range(len(exact)), key=lambda i: (amounts[i] - exact[i], i))
    for i in order[: total - sum(amounts)]:
        amounts[i] += 1
    return amounts
