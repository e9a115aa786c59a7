"""Files of tensors that are made once from a checkpoint, under a key that changes with its files, and mapped then."""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8}
"""A numpy type for each dtype of safetensors. numpy has no bf16, so its bits are written."""
OutputTensors = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor to be written to a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(DTYPES[self.dtype]).itemsize


def files_key(files: Sequence[Path], *what: object) -> str:
    """Return a key that changes with the files and with `what` is made of them."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr((*what, stats)).encode()).hexdigest()[:16]


def write_tensors(path: Path, parts: Sequence[TensorPart], fill: Callable[[OutputTensors], None]) -> None:
    """Write the tensors that `fill` writes to their arrays. The file has a temporary name until it is on the disk, so
    that it is always complete. Raises UNAVAILABLE if its folder cannot be written."""
    try:
        _write(path, parts, fill)
    except OSError as error:
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"the {path.parent.name} weights cannot be written to {path.parent}: {error}; set cache_path to a folder "
            "with room",
            param="cache_path",
        ) from error


def _write(path: Path, parts: Sequence[TensorPart], fill: Callable[[OutputTensors], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.unfinished-", delete=False) as file:
        unfinished = Path(file.name)
        try:
            fill(_allocate(file.fileno(), parts))
            os.fsync(file.fileno())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _allocate(descriptor: int, parts: Sequence[TensorPart]) -> OutputTensors:
    """Write the header and return the file's tensors, which are written through a shared map of the file."""
    # The widest elements first, so that all are aligned.
    parts = sorted(parts, key=lambda part: -np.dtype(DTYPES[part.dtype]).itemsize)
    header, size_bytes = _header(parts)
    # Allocated now, because a disk that fills up under a map would end the process instead of raising.
    os.posix_fallocate(descriptor, 0, len(header) + size_bytes)
    file = mmap.mmap(descriptor, len(header) + size_bytes)
    file[: len(header)] = header
    output: dict[str, NDArray[np.generic]] = {}
    offset = len(header)
    for part in parts:
        flat = np.frombuffer(file, np.uint8, part.size_bytes, offset)
        output[part.name] = flat.view(DTYPES[part.dtype]).reshape(part.shape)
        offset += part.size_bytes
    return output


def _header(parts: Sequence[TensorPart]) -> tuple[bytes, int]:
    """Return the safetensors header, padded to a multiple of 64 bytes, and the number of bytes of data after it."""
    entries, offset = {}, 0
    for part in parts:
        end = offset + part.size_bytes
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offset
