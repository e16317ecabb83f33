"""Decoding caches as transformers' layers ask for them, over a RaggedKV: an update writes, only `kv.commit` keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache

from blockdraft.ops.ragged_kv import RaggedKV


class CausalCache(Cache):
    """Keys and values of a decoder's own positions."""

    def __init__(self, kv: RaggedKV) -> None:
        super().__init__(layers=[])
        self.kv = kv

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self.kv.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row that is not named in `rows` (indices, [R'])."""
        self.kv.keep_rows(rows)


@dataclass(slots=True)
class CrossLayer:
    """Keys and values of the encoder's positions in one decoder layer, [R, K, S, H]."""

    keys: Tensor
    values: Tensor


class CrossCache:
    """Written once, in the first step, and only read from then on."""

    def __init__(self) -> None:
        self.layers: dict[int, CrossLayer] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.layers[layer_idx] = CrossLayer(key_states, value_states)
        return key_states, value_states

    def keep_rows(self, rows: Tensor) -> None:
        for layer in self.layers.values():
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class EncoderDecoderCache:
    """A decoder's own positions beside those of its encoder, by the names of transformers' class for both.

    Attributes:
        source_lengths: positions of each row's encoder, int64 [R].
        is_updated: by layer, whether the encoder's keys are in the cache.
    """

    def __init__(self, kv: RaggedKV, encoded_RSE: Tensor, source_lengths: Tensor) -> None:
        self.kv = kv
        self.self_attention_cache = CausalCache(kv)
        self.cross_attention_cache = CrossCache()
        self.is_updated: dict[int, bool] = {}
        self.source_lengths = source_lengths
        self._encoded_RSE = encoded_RSE

    @property
    def encoded_RSE(self) -> Tensor:
        """States of the encoder; of no width once every layer has its keys: then only their shape is asked for."""
        if self.is_updated and self._encoded_RSE.shape[-1]:
            self._encoded_RSE = self._encoded_RSE.new_empty(*self._encoded_RSE.shape[:-1], 0)
        return self._encoded_RSE

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kv.longest

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row that is not named in `rows` (indices, [R'])."""
        self.kv.keep_rows(rows)
        self.cross_attention_cache.keep_rows(rows)
        self.source_lengths = self.source_lengths[rows]
        self._encoded_RSE = self._encoded_RSE[rows]
