"""Tensors of safetensors files, whole or by rows: of a folder, or of a hub repository by ranged requests.

No file is read whole. A header says where each tensor lies; a row is a range of bytes. On the hub each file costs one
request for its place, two for its header and one for every row or piece of a tensor, so that what is not asked for is
not fetched.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_CONNECTIONS = 8  # requests at a time
_PIECE = 2**23  # bytes of a whole tensor that are asked for at once
_LONGEST_HEADER = 100_000_000  # the format's own limit


class RangedFile(Protocol):
    """A file of which any range of bytes can be had."""

    def read(self, start: int, length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of a folder."""

    path: Path

    def read(self, start: int, length: int) -> bytes:
        with self.path.open("rb") as handle:
            handle.seek(start)
            return handle.read(length)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a hub repository, at the address to which the hub redirects."""

    url: str
    headers: dict[str, str]

    def read(self, start: int, length: int) -> bytes:
        from huggingface_hub.utils._http import http_stream_backoff

        headers = {**self.headers, "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff("GET", self.url, headers=headers, follow_redirects=True) as answer:
            answer.raise_for_status()
            if answer.status_code != 206:  # a whole file would follow
                raise ValueError(f"the server of {urlsplit(self.url).netloc} does not give ranges of files")
            return b"".join(answer.iter_bytes())


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies.

    Attributes:
        dtype: as the file spells it.
        start: of its first byte in the file.
    """

    file: RangedFile
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix; one of a vector."""
        return math.prod(self.shape[:-1])

    def row(self, index: int) -> Tensor:
        """A row of the tensor seen as a matrix.

        Raises:
            ValueError: of a dtype that has no plain numbers, or the file is too short.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} has no rows of plain numbers")
        dtype = DTYPES[self.dtype]
        length = self.shape[-1] * dtype.itemsize
        data = self.file.read(self.start + index * length, length)
        if len(data) != length:
            raise ValueError("a safetensors file ends too early")
        return torch.frombuffer(bytearray(data), dtype=dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """All of the tensor in a dtype, on the CPU; read in pieces, so that little more than the result is in memory.

        Raises:
            ValueError: as `row` does.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} has no rows of plain numbers")
        stored, made = DTYPES[self.dtype], torch.empty(self.shape, dtype=dtype)
        flat, at_once = made.view(-1), _PIECE // DTYPES[self.dtype].itemsize

        def read(first: int) -> None:
            count = min(at_once, flat.numel() - first)
            length = count * stored.itemsize
            data = self.file.read(self.start + first * stored.itemsize, length)
            if len(data) != length:
                raise ValueError("a safetensors file ends too early")
            flat[first : first + count] = torch.frombuffer(bytearray(data), dtype=stored)

        firsts = range(0, flat.numel(), at_once)
        if isinstance(self.file, LocalFile):
            for first in firsts:
                read(first)
        else:
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                list(pool.map(read, firsts))
        return made


def read_rows(places: Sequence[tuple[Stored, int]]) -> list[Tensor]:
    """Rows of tensors, in the order asked for; those of the hub several at a time."""
    if all(isinstance(stored.file, LocalFile) for stored, _ in places):
        return [stored.row(index) for stored, index in places]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return list(pool.map(lambda place: place[0].row(place[1]), places))


def tensors_of(name_or_path: str, revision: str | None) -> dict[str, Stored]:
    """Tensors of a folder or hub id, by their names in the files.

    Raises:
        Exception: whatever the hub's client, a damaged file or the file system raises.
    """
    folder = Path(name_or_path)
    files = _folder_files(folder) if folder.is_dir() else _hub_files(name_or_path, revision)
    return {name: stored for file in files for name, stored in _header(file).items()}


def _header(file: RangedFile) -> dict[str, Stored]:
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > _LONGEST_HEADER:
        raise ValueError("damaged safetensors file (its header has no end)")
    entries: dict[str, Any] = json.loads(file.read(8, length))
    entries.pop("__metadata__", None)
    return {
        name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def _folder_files(folder: Path) -> list[RangedFile]:
    if (folder / INDEX).is_file():
        return [LocalFile(folder / name) for name in _shards((folder / INDEX).read_text(encoding="utf-8"))]
    return [LocalFile(path) for path in sorted(folder.glob("*.safetensors"))]


def _hub_files(name: str, revision: str | None) -> list[RangedFile]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        index = Path(hf_hub_download(name, INDEX, revision=revision))
        names = _shards(index.read_text(encoding="utf-8"))
    except EntryNotFoundError:
        names = [SINGLE]
    return [_hub_file(name, each, revision) for each in names]


def _hub_file(name: str, filename: str, revision: str | None) -> RangedFile:
    """The file in the local cache, if an earlier download left it there, else the one on the hub."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils._headers import build_hf_headers

    cached = try_to_load_from_cache(name, filename, revision=revision)
    if isinstance(cached, str):
        return LocalFile(Path(cached))
    url = hf_hub_url(name, filename, revision=revision)
    location = get_hf_file_metadata(url).location
    # A storage server that the hub redirects to knows by the address who asks; a token is the hub's alone.
    same_host = urlsplit(location).netloc == urlsplit(url).netloc
    return HubFile(location, build_hf_headers() if same_host else {})


def _shards(index: str) -> list[str]:
    return sorted(set(json.loads(index)["weight_map"].values()))
