"""A key/value store for rows of unequal length, with rollback by not committing.

Both sides of speculative decoding need the same thing: write the keys of tokens that may be rejected, read them
together with the committed ones, then keep only what was verified. Here a write never moves a row's length; `commit`
does. What was written beyond a row's length is dead at once and is overwritten by the next write, so the keys of
rejected tokens and of mask slots cannot persist.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 256  # positions by which the capacity grows; growing copies, so not too small


class RaggedKV:
    """Keys and values of `num_layers` layers for `num_rows` rows.

    Layers are allocated at their first write, since families may differ in heads from layer to layer.

    Attributes:
        lengths: committed positions of each row, int64 [R].
    """

    def __init__(self, num_layers: int, num_rows: int, device: torch.device) -> None:
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._longest = 0
        self._uniform = True

    @property
    def longest(self) -> int:
        """Committed positions of the longest row."""
        return self._longest

    def positions(self, width: int) -> Tensor:
        """Absolute positions that a write of `width` tokens takes, [R, width]."""
        return self.lengths[:, None] + torch.arange(width, device=self.lengths.device)

    def write(self, layer: int, key_RKWH: Tensor, value_RKWH: Tensor) -> tuple[Tensor, Tensor]:
        """Write `width` positions behind each row's committed ones.

        Returns:
            keys and values of positions 0 .. longest + width, [R, K, longest + width, H]: committed and new ones,
            with junk behind the end of shorter rows, which the caller's mask must hide.
        """
        width = key_RKWH.shape[2]
        keys, values = self._room(layer, key_RKWH, value_RKWH, self._longest + width)
        if self._uniform:
            keys[:, :, self._longest : self._longest + width] = key_RKWH
            values[:, :, self._longest : self._longest + width] = value_RKWH
        else:
            rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
            positions = self.positions(width)
            keys[rows, :, positions] = key_RKWH.transpose(1, 2)
            values[rows, :, positions] = value_RKWH.transpose(1, 2)
        end = self._longest + width
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, counts: Tensor) -> None:
        """Keep the first `counts` [R] of the positions written last; the rest is dropped."""
        self._set_lengths(self.lengths + counts)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row that is not named in `rows` (indices, [R'])."""
        self._keys = [None if keys is None else keys[rows] for keys in self._keys]
        self._values = [None if values is None else values[rows] for values in self._values]
        self._set_lengths(self.lengths[rows])

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths = lengths
        if len(lengths):
            self._longest = int(lengths.max())
            self._uniform = int(lengths.min()) == self._longest

    def _room(self, layer: int, key: Tensor, value: Tensor, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None or keys.shape[2] < end:
            capacity = (end + GROWTH - 1) // GROWTH * GROWTH
            # Zeros, not empty: junk behind a short row is masked, but a NaN would survive the mask as 0 * NaN.
            grown_keys = key.new_zeros(*key.shape[:2], capacity, key.shape[3])
            grown_values = value.new_zeros(*value.shape[:2], capacity, value.shape[3])
            if keys is not None and values is not None:
                grown_keys[:, :, : keys.shape[2]] = keys
                grown_values[:, :, : values.shape[2]] = values
            keys, values = self._keys[layer], self._values[layer] = grown_keys, grown_values
        return keys, values
