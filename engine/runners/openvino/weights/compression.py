"""Weights compressed to int8 or int4: quantization, the file of compressed weights, and their graph constants.

int8 is symmetric with one scale a row. int4 has a scale and a zero point for each GROUP weights of a row. Token
embeddings and the LM head, which lose the most accuracy and are read the least, stay at int8, and so do rows whose
length is not a multiple of GROUP.

The compressed weights are written to a file once, which is then mapped like the checkpoint itself. They could be made
in memory at each start, but the runtime has the weights in its own layout besides the graph's constants, and only
constants in a file can release their memory.
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
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import Constant

from engine.runners.base import FloatArray
from engine.runners.openvino.weights.mapped import FLOAT_TYPES, StoredTensor, map_tensors
from sluice.errors import ErrorCode, SluiceError

logger = logging.getLogger(__name__)

INT8, INT4 = "int8", "int4"
NONE = "none"
QUANTIZATIONS = (INT8, INT4)
SCALES, ZEROS = ".scales", ".zeros"
"""Suffixes of the tensors with the scales and zero points of a matrix, whose codes have its name."""
GROUP = 64
"""Consecutive weights of a row that share a scale under int4. Fewer cost memory, more cost accuracy."""

_VOCABULARY = ("embed", "lm_head")
"""Parts of the names of matrices that stay at int8."""
_FORMAT = "1"
"""Part of the file's key, to be raised when the same weights get other codes."""
_CHUNK_ELEMENTS = 1 << 18
"""Weights that a thread takes at once: 1 MiB as float32, so that they stay in its cache."""
_LEAST_SCALE = np.float32(1e-12)
"""Lower bound of a scale, so that a row of zeros does not divide by zero."""
_DTYPES = {"F32": np.float32, "I8": np.int8, "U8": np.uint8}

OutputTensors = dict[str, NDArray[np.generic]]


# -- compressed tensors as graph constants


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A matrix as codes with their scales, and zero points if it is in groups (int4)."""

    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix. In int4, two codes share a byte."""
        rows, columns = self.codes.shape
        return (rows, columns) if self.zeros is None else (rows, 2 * columns)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def node(self, name: str) -> ov.Node:
        """Return the matrix as f32, in the form that the plugin keeps compressed: Convert, Subtract, Multiply,
        Reshape."""
        scales = _constant(self.scales, ov.Type.f32, self.scales.shape)
        if self.zeros is None:
            codes = _constant(self.codes, ov.Type.i8, self.codes.shape, name)
            return ops.multiply(ops.convert(codes, "f32"), scales)
        rows, groups, _ = self.scales.shape
        codes = _constant(self.codes, ov.Type.u4, (rows, groups, GROUP), name)
        zeros = ops.convert(_constant(self.zeros, ov.Type.u8, self.zeros.shape), "f32")
        grouped = ops.multiply(ops.subtract(ops.convert(codes, "f32"), zeros), scales)
        return ops.reshape(grouped, ops.constant(np.array([rows, groups * GROUP], np.int64)), False)


def _constant(stored: StoredTensor, kind: ov.Type, shape: tuple[int, ...], name: str = "") -> ov.Node:
    constant = Constant(stored.tensor(kind, shape), shared_memory=True)
    if name:
        constant.set_friendly_name(name)
    return constant


def pair_up(parts: Mapping[str, StoredTensor]) -> dict[str, CompressedTensor]:
    """Return the matrices whose codes, scales and zero points are in `parts`."""
    names = (name.removesuffix(SCALES) for name in parts if name.endswith(SCALES))
    return {name: CompressedTensor(parts[name], parts[name + SCALES], parts.get(name + ZEROS)) for name in names}


# -- the file of compressed weights


def compress(
    tensors: Mapping[str, StoredTensor], files: Sequence[Path], quantization: str, folder: Path
) -> dict[str, CompressedTensor]:
    """Return the compressed matrices of `tensors`, which are in `files`. Their file is made in `folder` if missing.
    Raises UNAVAILABLE if the folder cannot be written."""
    path = folder / f"{_key(files, quantization)}.safetensors"
    if not path.is_file():
        started = time.monotonic()
        try:
            _write(path, tensors, quantization)
        except OSError as error:
            raise SluiceError(
                ErrorCode.UNAVAILABLE,
                f"the compressed weights cannot be written to {folder}: {error}; set cache_path to a folder with room",
                param="cache_path",
            ) from error
        seconds, mebibytes = time.monotonic() - started, path.stat().st_size >> 20
        logger.info("compressed weights to %s in %.1f s: %s, %d MiB", quantization, seconds, path, mebibytes)
    return pair_up(map_tensors(path))


def code_kind(name: str, stored: StoredTensor, quantization: str) -> str | None:
    """Return INT8 or INT4 for a matrix that is compressed, None for a tensor that is not."""
    if len(stored.shape) != 2 or stored.dtype not in FLOAT_TYPES or not name.endswith(".weight"):
        return None
    has_whole_groups = stored.shape[1] % GROUP == 0
    is_int4 = quantization == INT4 and has_whole_groups and not any(part in name for part in _VOCABULARY)
    return INT4 if is_int4 else INT8


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to be written to the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(_DTYPES[self.dtype]).itemsize


def _key(files: Sequence[Path], quantization: str) -> str:
    """Return a key that changes with the weights, the quantization and the format."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((_FORMAT, GROUP, stats)).encode()).hexdigest()
    return f"{digest[:16]}-{quantization}"


def _write(path: Path, tensors: Mapping[str, StoredTensor], quantization: str) -> None:
    """Write the file under a temporary name and rename it when it is on the disk, so that it is always complete."""
    kinds = {name: kind for name, stored in tensors.items() if (kind := code_kind(name, stored, quantization))}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.unfinished-", delete=False) as file:
        unfinished = Path(file.name)
        try:
            parts = [part for name, kind in kinds.items() for part in _parts(tensors[name], name, kind)]
            output = _allocate(file.fileno(), parts)
            _quantize(output, tensors, kinds)
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


def _allocate(descriptor: int, parts: Sequence[_Part]) -> OutputTensors:
    """Write the header and return the file's tensors, which are written through a shared map of the file."""
    parts = sorted(parts, key=lambda part: part.dtype != "F32")  # float32 first, so that it is aligned
    header, size_bytes = _header(parts)
    # Allocated now, because a disk that fills up under a map would end the process instead of raising.
    os.posix_fallocate(descriptor, 0, len(header) + size_bytes)
    file = mmap.mmap(descriptor, len(header) + size_bytes)
    file[: len(header)] = header
    output: OutputTensors = {}
    offset = len(header)
    for part in parts:
        flat = np.frombuffer(file, np.uint8, part.size_bytes, offset)
        output[part.name] = flat.view(_DTYPES[part.dtype]).reshape(part.shape)
        offset += part.size_bytes
    return output


def _header(parts: Sequence[_Part]) -> tuple[bytes, int]:
    """Return the safetensors header, padded to a multiple of 64 bytes, and the number of bytes of data after it."""
    entries, offset = {}, 0
    for part in parts:
        end = offset + part.size_bytes
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text, offset


def _quantize(output: OutputTensors, tensors: Mapping[str, StoredTensor], kinds: Mapping[str, str]) -> None:
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


# -- quantization; a weight is (code - zero point) * scale, and rows are output features


def quantize_rows(weights: FloatArray) -> tuple[NDArray[np.int8], FloatArray]:
    """Quantize `weights`, overwriting them, to int8 codes [rows, columns] with symmetric scales [rows, 1]."""
    largest = np.maximum(weights.max(1, keepdims=True), -weights.min(1, keepdims=True))
    scales = np.maximum(largest / np.float32(127), _LEAST_SCALE)
    weights *= 1 / scales
    return np.rint(weights, out=weights).astype(np.int8), scales


def quantize_groups(weights: FloatArray) -> tuple[NDArray[np.uint8], FloatArray, NDArray[np.uint8]]:
    """Quantize to int4 with a scale and a zero point for each GROUP weights of a row. `weights` is overwritten. Returns
    codes [rows, columns / 2], two in a byte, the first in its lower half, and scales and zero points [rows, groups, 1],
    the latter a byte each. The number of columns must be a multiple of GROUP."""
    grouped = weights.reshape(len(weights), -1, GROUP)
    # Zero stays exact, because rows are often padded with it.
    low = np.minimum(_fold(np.minimum, grouped), 0)
    high = np.maximum(_fold(np.maximum, grouped), 0)
    scales = np.maximum((high - low) / np.float32(15), _LEAST_SCALE)
    zeros = np.rint(-low / scales)
    grouped *= 1 / scales
    grouped += zeros
    codes = np.rint(grouped, out=grouped).clip(0, 15, out=grouped).astype(np.uint8)
    return _pack(codes.reshape(len(weights), -1)), scales, zeros.astype(np.uint8)


def _fold(pairwise: np.ufunc, grouped: FloatArray) -> FloatArray:
    """Reduce the last axis to length 1, by halves: numpy's own reduction is ten times slower on short axes."""
    while (width := grouped.shape[2]) > 1:
        grouped = pairwise(grouped[:, :, : width // 2], grouped[:, :, width // 2 :])
    return grouped


def _pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pairs = codes.view("<u2")  # the first code of a pair is in the lower byte, whose upper half is free
    packed: NDArray[np.uint8] = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed
