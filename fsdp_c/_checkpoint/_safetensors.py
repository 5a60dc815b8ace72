"""Tensors in files of the safetensors format, read and written through mappings.

The format is a length (8 bytes, little-endian), a header in JSON that gives each tensor's dtype,
shape and place, and the tensors' bytes. Readers on one host share the page cache, and take from
the disk only the pages that they look at.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_CRC = "crc32/"  # in the metadata, before a tensor's name
_HEADER_MAX = 100_000_000  # the format's own limit
_ALIGN = 64


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    _bytes: torch.Tensor  # of the mapping
    _crc: str | None = None  # None: its writer noted none

    @property
    def is_intact(self) -> bool:
        """Whether the bytes are those that were written; reads them all."""
        return self._crc in (None, _crc_of(self._bytes))

    def tensor(self) -> torch.Tensor:
        """The tensor, which shows the file: only what is used of it is read."""
        part = self._bytes
        if part.storage_offset() % self.dtype.itemsize:  # of a writer that does not align
            part = part.clone()
        return part.view(self.dtype).view(self.shape)


def read(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """The file's tensors by name."""
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _HEADER_MAX):
            raise ValueError(f"{path} is not a safetensors file, or is cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from None
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    notes = header.pop(_METADATA, {})
    return {
        name: _entry(path, name, about, data, notes.get(_CRC + name))
        for name, about in header.items()
    }


def _crc_of(data: torch.Tensor) -> str:
    """Of a tensor of bytes: 8 digits."""
    memory = (ctypes.c_char * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return f"{zlib.crc32(memory):08x}"


def _entry(
    path: Path, name: str, about: dict[str, Any], data: torch.Tensor, crc: str | None
) -> Entry:
    dtype = DTYPES.get(about["dtype"])
    begin, end = about["data_offsets"]
    if dtype is None:
        raise ValueError(f"{path}: tensor '{name}' has the unknown dtype {about['dtype']}")
    if not 0 <= begin <= end <= data.numel():
        raise ValueError(f"{path} is cut off: tensor '{name}' lies behind its end")
    if end - begin != math.prod(about["shape"]) * dtype.itemsize:
        raise ValueError(f"{path}: tensor '{name}' has not the bytes of its shape")
    return Entry(tuple(about["shape"]), dtype, data[begin:end], crc)


def name_of(dtype: torch.dtype, what: str) -> str:
    if dtype not in NAMES:
        raise ValueError(
            f"{what} is {dtype}, which a safetensors file cannot hold: use"
            " torch.distributed.checkpoint"
        )
    return NAMES[dtype]


def write(path: Path, tensors: Mapping[str, torch.Tensor], *, checksums: bool = False) -> None:
    """Writes CPU tensors and brings them to the disk; needs no memory for copies."""
    # The largest elements first: so each lies at a multiple of its size, and there are no holes.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    # Placeholders, as long as what replaces them when the bytes are known.
    crcs = {_CRC + name: "0" * 8 for name in tensors} if checksums else {}
    header: dict[str, Any] = {_METADATA: crcs}
    at = 0
    for name, tensor in tensors.items():
        n_bytes = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": name_of(tensor.dtype, f"'{name}'"),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + n_bytes],
        }
        at += n_bytes
    length = len(json.dumps(header))
    length += -(8 + length) % _ALIGN
    size = 8 + length + at
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a signal
        data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)[8 + length :]
        for name, tensor in tensors.items():
            part = data[slice(*header[name]["data_offsets"])]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            if checksums:
                crcs[_CRC + name] = _crc_of(part)
        del data
        file.write(length.to_bytes(8, "little") + json.dumps(header).encode().ljust(length))
        file.flush()
        os.fsync(file.fileno())
