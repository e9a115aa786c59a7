"""Memory-mapped tensors of safetensors files. A mapped tensor takes no memory until it is read, and the memory can be
released again."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sluice.engine.arrays import FloatArray
from sluice.errors import ErrorCode, SluiceError, invalid

FLOAT_TYPES = ("BF16", "F16", "F32")
"""The types of weights that are not compressed."""
_NUMPY_TYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_NUMPY_TYPES |= {"I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8}
_HEADER_LENGTH_BYTES = 8


class _HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in a safetensors header. Offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the map of its file."""

    file: mmap.mmap
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    scale: "StoredTensor | None" = None
    """The scales of 8-bit floats, which are codes without them; see `scaled`."""

    def matrix(self, number: int) -> "StoredTensor":
        """Return one of the parts along the first axis."""
        size_bytes = self.size_bytes // self.shape[0]
        return StoredTensor(self.file, self.offset + number * size_bytes, size_bytes, self.dtype, self.shape[1:])

    def array(self) -> NDArray[np.generic]:
        """Return the elements, without a copy. bf16 and 8-bit floats, which numpy lacks, are returned as their bits."""
        flat = np.frombuffer(self.file, np.uint8, self.size_bytes, self.offset)
        return flat.view(_NUMPY_TYPES[self.dtype]).reshape(self.shape)

    def floats(self, rows: slice) -> FloatArray:
        """Return a copy of the rows in float32, counted through all axes but the last."""
        return to_float32(self.array().reshape(-1, self.shape[-1])[rows], self.dtype)

    def all_floats(self) -> FloatArray:
        """Return a copy in float32. Raises UNIMPLEMENTED for a tensor of codes."""
        if self.dtype not in FLOAT_TYPES:
            message = f"a tensor of scales is stored as {self.dtype}; supported: {', '.join(FLOAT_TYPES)}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
        return to_float32(self.array(), self.dtype)

    def release(self) -> None:
        """Release the resident pages of the tensor's file. If they are accessed again, they are read from it."""
        self.file.madvise(mmap.MADV_DONTNEED)


def to_float32(values: NDArray[np.generic], dtype: str) -> FloatArray:
    """Return a copy in float32 of floats, those of bf16 given as their bits."""
    if dtype != "BF16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def map_tensors(path: Path) -> dict[str, StoredTensor]:
    """Map the tensors of one file. Returns them by name. Raises SluiceError INVALID for a damaged file."""
    _check_intact(path)
    with path.open("rb") as handle:
        # Copy-on-write, because OpenVINO and torch take only writable buffers; nothing writes to them.
        file = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    header_bytes = int.from_bytes(file[:_HEADER_LENGTH_BYTES], "little")
    base = _HEADER_LENGTH_BYTES + header_bytes
    header = msgspec.json.decode(file[_HEADER_LENGTH_BYTES:base])
    header.pop("__metadata__", None)
    entries = msgspec.convert(header, dict[str, _HeaderEntry])
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        tensors[name] = StoredTensor(file, base + begin, end - begin, entry.dtype, entry.shape)
    return tensors


def _check_intact(path: Path) -> None:
    """Let the library check header, offsets and file length, on which the mapping relies."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except FileNotFoundError as error:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} does not exist", param="model_path") from error
    except SafetensorError as error:
        raise invalid("model_path", f"{path.name} is damaged: {error}") from error
