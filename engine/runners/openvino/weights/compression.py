"""Makes the file of a checkpoint's compressed weights: once, then it is mapped like the checkpoint itself.

They could be made in memory at each start. But the runtime holds the weights in its own layout besides
the graph's constants, and only constants that lie in a file can give their memory back.
"""

import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.runners.openvino.weights.compressed import INT4, SCALES, ZEROS, CompressedTensor, code_kind, pair_up
from engine.runners.openvino.weights.quantize import GROUP, quantize_groups, quantize_rows
from engine.runners.openvino.weights.stored import StoredTensor, map_tensors
from sluice.errors import ErrorCode, SluiceError

logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Part of the file's name: raise it when the same weights get other codes."""
_CHUNK_ELEMENTS = 1 << 18
"""Weights that a thread takes at once: 1 MiB as float32, so that they stay in its cache."""
_DTYPES = {"F32": np.float32, "I8": np.int8, "U8": np.uint8}

Output = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the file to be."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(_DTYPES[self.dtype]).itemsize


def compress(
    tensors: Mapping[str, StoredTensor], files: Sequence[Path], quantization: str, folder: Path
) -> dict[str, CompressedTensor]:
    """The matrices among `tensors`, which lie in `files`, compressed; made in `folder` unless they are there.

    Raises SluiceError UNAVAILABLE where the folder cannot be written.
    """
    path = folder / f"{_key(files, quantization)}.safetensors"
    if not path.is_file():
        started = time.monotonic()
        try:
            _make(path, tensors, quantization)
        except OSError as error:
            raise SluiceError(
                ErrorCode.UNAVAILABLE,
                f"the compressed weights cannot be written to {folder}: {error}; set cache_path to a folder with room",
                param="cache_path",
            ) from error
        seconds, mebibytes = time.monotonic() - started, path.stat().st_size >> 20
        logger.info("compressed weights to %s in %.1f s: %s, %d MiB", quantization, seconds, path, mebibytes)
    return pair_up(map_tensors(path))


def _key(files: Sequence[Path], quantization: str) -> str:
    """Another for every change of the weights, the kind or our code."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((_FORMAT, GROUP, stats)).encode()).hexdigest()
    return f"{digest[:16]}-{quantization}"


def _make(path: Path, tensors: Mapping[str, StoredTensor], quantization: str) -> None:
    """Written beside its name and renamed when whole and on the disk, so that a file of that name is always good."""
    kinds = {name: kind for name, stored in tensors.items() if (kind := code_kind(name, stored, quantization))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.unfinished-", delete=False) as file:
        unfinished = Path(file.name)
        try:
            parts = [part for name, kind in kinds.items() for part in _parts(tensors[name], name, kind)]
            output = _allocate(file.fileno(), parts)
            _fill(output, tensors, kinds)
            os.fsync(file.fileno())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)


def _parts(stored: StoredTensor, name: str, kind: str) -> Iterator[_Part]:
    rows, columns = stored.shape
    if kind == INT4:
        groups = columns // GROUP
        yield _Part(name, "U8", (rows, columns // 2))
        yield _Part(name + SCALES, "F32", (rows, groups, 1))
        yield _Part(name + ZEROS, "U8", (rows, groups, 1))
    else:
        yield _Part(name, "I8", (rows, columns))
        yield _Part(name + SCALES, "F32", (rows, 1))


def _allocate(descriptor: int, parts: Sequence[_Part]) -> Output:
    """The file's tensors, to be written through a shared map of it."""
    parts = sorted(parts, key=lambda part: part.dtype != "F32")  # first, so that they are aligned
    header, size_bytes = _header(parts)
    # Taken now: a disk that fills up under a map would end the process instead of raising.
    os.posix_fallocate(descriptor, 0, len(header) + size_bytes)
    file = mmap.mmap(descriptor, len(header) + size_bytes)
    file[: len(header)] = header
    output: Output = {}
    offset = len(header)
    for part in parts:
        flat = np.frombuffer(file, np.uint8, part.size_bytes, offset)
        output[part.name] = flat.view(_DTYPES[part.dtype]).reshape(part.shape)
        offset += part.size_bytes
    return output


def _header(parts: Sequence[_Part]) -> tuple[bytes, int]:
    """The header of the safetensors format, padded to a multiple of 64 bytes, and the bytes of data after it."""
    entries, offset = {}, 0
    for part in parts:
        end = offset + part.size_bytes
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _fill(output: Output, tensors: Mapping[str, StoredTensor], kinds: Mapping[str, str]) -> None:
    def work(task: tuple[str, slice]) -> None:
        name, rows = task
        weights = tensors[name].floats(rows)
        if kinds[name] == INT4:
            output[name][rows], output[name + SCALES][rows], output[name + ZEROS][rows] = quantize_groups(weights)
        else:
            output[name][rows], output[name + SCALES][rows] = quantize_rows(weights)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compress") as workers:
        for _ in workers.map(work, _tasks(tensors, kinds)):
            pass


def _tasks(tensors: Mapping[str, StoredTensor], kinds: Mapping[str, str]) -> Iterator[tuple[str, slice]]:
    for name in kinds:
        rows, columns = tensors[name].shape
        step = max(1, _CHUNK_ELEMENTS // columns)
        yield from ((name, slice(start, min(start + step, rows))) for start in range(0, rows, step))
