"""Weights compressed to int8 or int4: quantization, the file of compressed weights, and their graph constants.

int8 is symmetric with one scale a row. int4 has a scale and a zero point for each GROUP weights of a row. Token
embeddings and the LM head, which lose the most accuracy and are read the least, stay at int8, and so do rows whose
length is not a multiple of GROUP.

The compressed weights are written to a file once, which is then mapped like the checkpoint itself. They could be made
in memory at each start, but the runtime has the weights in its own layout besides the graph's constants, and only
constants in a file can release their memory.
"""

import logging
import math
import mmap
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import Constant

from sluice.engine.arrays import FloatArray
from sluice.engine.models.weights.assembled import Weight
from sluice.engine.models.weights.files import INT4, INT8, SCALES, ZEROS
from sluice.engine.models.weights.mapped import FLOAT_TYPES, StoredTensor, map_tensors
from sluice.engine.models.weights.tensor_file import OutputTensors, TensorPart, files_key, write_tensors

OPENVINO_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
_ELEMENTS = {1: np.uint8, 2: np.float16, 4: np.float32}
"""A numpy type for each element size."""


def stored_tensor(stored: StoredTensor, kind: ov.Type, shape: Sequence[int]) -> ov.Tensor:
    """Return the bytes of a stored tensor as one of OpenVINO's `kind`. Its file must stay mapped."""
    return shared_tensor(stored.file, stored.offset, stored.size_bytes, kind, shape)


def shared_tensor(memory: mmap.mmap, offset: int, size_bytes: int, kind: ov.Type, shape: Sequence[int]) -> ov.Tensor:
    """Return `size_bytes` of `memory` from `offset` as a tensor, not copied. The map's owner must keep it alive."""
    # numpy has no bf16 and no 4-bit types, but OpenVINO only compares the size of the elements.
    element = np.dtype(_ELEMENTS[kind.size])
    flat = np.frombuffer(memory, element, size_bytes // kind.size, offset)
    return ov.Tensor(flat, ov.Shape(list(shape)), kind)


logger = logging.getLogger(__name__)

GROUP = 64
"""Consecutive weights of a row that share a scale under int4. Fewer cost memory, more cost accuracy."""

_VOCABULARY = ("embed", "lm_head")
"""Parts of the names of matrices that stay at int8."""
_ROUTER = re.compile(r"\.(gate|router|router\.layer|shared_expert_gate)\.weight$")
"""Matches matrices that choose experts. They are small, and a choice that changes costs more than a rounded sum."""
_FORMAT = "1"
"""Part of the file's key, to be raised when the same weights get other codes."""
_CHUNK_ELEMENTS = 1 << 18
"""Weights that a thread takes at once: 1 MiB as float32, so that they stay in its cache."""
_LEAST_SCALE = np.float32(1e-12)
"""Lower bound of a scale, so that a row of zeros does not divide by zero."""


# -- compressed tensors as graph constants


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A matrix as codes with their scales, and zero points if it is in groups (int4)."""

    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, or of a stack of them. In int4, two codes share a byte."""
        *rows, columns = self.codes.shape
        return (*rows, columns) if self.zeros is None else (*rows, 2 * columns)

    def matrix(self, number: int) -> "CompressedTensor":
        """Return one matrix of a stack."""
        zeros = None if self.zeros is None else self.zeros.matrix(number)
        return CompressedTensor(self.codes.matrix(number), self.scales.matrix(number), zeros)

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
        codes = _constant(self.codes, ov.Type.u4, (*self.scales.shape[:-1], GROUP), name)
        zeros = ops.convert(_constant(self.zeros, ov.Type.u8, self.zeros.shape), "f32")
        grouped = ops.multiply(ops.subtract(ops.convert(codes, "f32"), zeros), scales)
        return ops.reshape(grouped, ops.constant(np.array(self.shape, np.int64)), False)


def _constant(stored: StoredTensor, kind: ov.Type, shape: tuple[int, ...], name: str = "") -> ov.Node:
    constant = Constant(stored_tensor(stored, kind, shape), shared_memory=True)
    if name:
        constant.set_friendly_name(name)
    return constant


def pair_up(parts: Mapping[str, StoredTensor]) -> dict[str, CompressedTensor]:
    """Return the matrices whose codes, scales and zero points are in `parts`."""
    names = (name.removesuffix(SCALES) for name in parts if name.endswith(SCALES))
    return {name: CompressedTensor(parts[name], parts[name + SCALES], parts.get(name + ZEROS)) for name in names}


# -- the file of compressed weights


def compress(
    tensors: Mapping[str, Weight], files: Sequence[Path], quantization: str, folder: Path
) -> dict[str, CompressedTensor]:
    """Return the compressed matrices of `tensors`, which are in `files`. Their file is made in `folder` if missing.
    Raises UNAVAILABLE if the folder cannot be written."""
    path = folder / f"{files_key(files, _FORMAT, GROUP)}-{quantization}.safetensors"
    if not path.is_file():
        started = time.monotonic()
        kinds = {name: kind for name, stored in tensors.items() if (kind := code_kind(name, stored, quantization))}
        parts = [part for name, kind in kinds.items() for part in _parts(tensors[name], name, kind)]
        write_tensors(path, parts, lambda output: _quantize(output, tensors, kinds))
        seconds, mebibytes = time.monotonic() - started, path.stat().st_size >> 20
        logger.info("compressed weights to %s in %.1f s: %s, %d MiB", quantization, seconds, path, mebibytes)
    return pair_up(map_tensors(path))


def code_kind(name: str, stored: Weight, quantization: str) -> str | None:
    """Return INT8 or INT4 for a matrix or a stack of them that is compressed, None for a tensor that is not."""
    is_matrix = len(stored.shape) == 2 or (len(stored.shape) == 3 and ".experts." in name)
    if not is_matrix or stored.dtype not in FLOAT_TYPES or not name.endswith(".weight") or _ROUTER.search(name):
        return None
    has_whole_groups = stored.shape[-1] % GROUP == 0
    is_int4 = quantization == INT4 and has_whole_groups and not any(part in name for part in _VOCABULARY)
    return INT4 if is_int4 else INT8


def _parts(stored: Weight, name: str, kind: str) -> Iterator[TensorPart]:
    *rows, columns = stored.shape
    if kind == INT4:
        groups = columns // GROUP
        yield TensorPart(name, "U8", (*rows, columns // 2))
        yield TensorPart(name + SCALES, "F32", (*rows, groups, 1))
        yield TensorPart(name + ZEROS, "U8", (*rows, groups, 1))
    else:
        yield TensorPart(name, "I8", (*rows, columns))
        yield TensorPart(name + SCALES, "F32", (*rows, 1))


def _quantize(output: OutputTensors, tensors: Mapping[str, Weight], kinds: Mapping[str, str]) -> None:
    def work(task: tuple[str, slice]) -> None:
        name, rows = task
        weights, (*_, columns) = tensors[name].floats(rows), tensors[name].shape
        codes, scales = output[name], output[name + SCALES]
        if kinds[name] == INT4:
            groups, zeros = (-1, columns // GROUP, 1), output[name + ZEROS]
            packed = quantize_groups(weights)
            codes.reshape(-1, columns // 2)[rows], scales.reshape(groups)[rows], zeros.reshape(groups)[rows] = packed
        else:
            codes.reshape(-1, columns)[rows], scales.reshape(-1, 1)[rows] = quantize_rows(weights)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compress") as workers:
        for _ in workers.map(work, _tasks(tensors, kinds)):
            pass


def _tasks(tensors: Mapping[str, Weight], kinds: Mapping[str, str]) -> Iterator[tuple[str, slice]]:
    """Yield the rows of each matrix in chunks; those of a stack are counted through."""
    for name in kinds:
        *shape, columns = tensors[name].shape
        rows, step = math.prod(shape), max(1, _CHUNK_ELEMENTS // columns)
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
