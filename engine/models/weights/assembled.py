"""Matrices that a checkpoint has in another form than the graph, which has them as [features out, features in], and
those of a layer's experts in one tensor, [num_experts, features out, features in], as their kernel wants them.

Checkpoints have experts one by one (most of the hub's), with gate and up projection of all in one tensor (transformers'
own modules, Granite), or the same transposed with alternating rows of gate and up (gpt-oss). GPT-2 has its matrices
transposed. What this module makes of them is in the files that Sluice writes, and stays as it is.
"""

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray
from sluice.engine.models.weights.mapped import FLOAT_TYPES, StoredTensor, map_tensors, to_float32
from sluice.engine.models.weights.tensor_file import OutputTensors, TensorPart, files_key, write_tensors
from sluice.errors import ErrorCode, SluiceError, invalid

logger = logging.getLogger(__name__)

_FORMAT = "assembled 1"
"""Part of the file's key, to be raised when its content changes."""
_ONE_EXPERT = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ALL_EXPERTS = re.compile(
    r"(?P<block>.+)\.(?P<part>experts\.gate_up_proj|experts\.down_proj|input_linear\.weight|output_linear\.weight)"
)
_GATE_AND_UP = ("experts.gate_up_proj", "input_linear.weight")
_TRANSPOSED = re.compile(r"(.+\.)?h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
"""Matches GPT-2's matrices."""


@dataclass(frozen=True, slots=True)
class AssembledTensor:
    """The matrices of all experts of a layer as one tensor, or with `has_experts` False one matrix. `tensors` are one
    for each expert, or one of all. `rows` of that belong to this tensor; with `is_transposed`, rows are its last
    axis."""

    tensors: tuple[StoredTensor, ...]
    rows: tuple[int, int]
    is_transposed: bool = False
    has_experts: bool = True

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0].shape
        matrix = self.rows[1] - self.rows[0], first[-2] if self.is_transposed else first[-1]
        return (self.num_matrices, *matrix) if self.has_experts else matrix

    @property
    def num_matrices(self) -> int:
        return self.tensors[0].shape[0] if self._are_together else len(self.tensors)

    @property
    def are_apart(self) -> bool:
        """Whether each matrix is a stored tensor as it is."""
        is_whole = self.rows == (0, self.tensors[0].shape[0])
        return not self._are_together and is_whole and not self.is_transposed

    @property
    def _are_together(self) -> bool:
        return len(self.tensors[0].shape) == 3

    def matrix(self, number: int) -> NDArray[np.generic]:
        """Return the elements of a matrix, without a copy. bf16 and 8-bit floats are returned as their bits."""
        whole = self.tensors[0].array()[number] if self._are_together else self.tensors[number].array()
        return (whole.T if self.is_transposed else whole)[slice(*self.rows)]

    def floats(self, rows: slice) -> FloatArray:
        """Return a copy of the rows in float32, counted through all matrices."""
        size = self.rows[1] - self.rows[0]
        parts = [
            self.matrix(each)[max(rows.start - each * size, 0) : min(rows.stop - each * size, size)]
            for each in range(rows.start // size, -(-rows.stop // size))
        ]
        return to_float32(np.concatenate(parts), self.dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether each matrix is a tensor of 8-bit floats with scales, as it is."""
        return self.are_apart and all(each.scale is not None for each in self.tensors)


Weight = StoredTensor | AssembledTensor


# -- recognized by their names


def assemble(tensors: Mapping[str, StoredTensor]) -> dict[str, Weight]:
    """Return the tensors of a checkpoint in the graph's form: matrices of GPT-2 under their own names, experts as
    `…experts.gate_proj.weight`, `up_proj` and `down_proj` (gpt-oss: `gate_up_proj`, whose rows alternate). Raises
    INVALID if those of an expert are missing, or unlike the others'."""
    found: dict[str, Weight] = {}
    singles: dict[str, dict[int, str]] = {}
    for name, stored in tensors.items():
        if match := _ONE_EXPERT.fullmatch(name):
            part = _PARTS.get(match["part"], match["part"])
            singles.setdefault(f"{match['experts']}.{part}.weight", {})[int(match["number"])] = name
        elif (match := _ALL_EXPERTS.fullmatch(name)) and len(stored.shape) == 3:
            found.update(_split(match["block"], match["part"], stored, f"{name}_bias" in tensors))
        elif _TRANSPOSED.fullmatch(name) and len(stored.shape) == 2:
            found[name] = AssembledTensor((stored,), (0, stored.shape[1]), is_transposed=True, has_experts=False)
        else:
            found[name] = stored
    for name, experts in singles.items():
        found[name] = _join(name, experts, tensors)
    for name, each in found.items():
        if isinstance(each, AssembledTensor) and each.dtype not in FLOAT_TYPES and not each.is_scaled:
            message = f"tensor {name!r} is stored as {each.dtype}; supported: {', '.join(FLOAT_TYPES)}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
    return found


def _split(block: str, part: str, stored: StoredTensor, is_gpt_oss: bool) -> dict[str, Weight]:
    """Return the parts of a tensor of all experts."""
    _, middle, last = stored.shape
    if is_gpt_oss:
        return {f"{block}.{part}.weight": AssembledTensor((stored,), (0, last), is_transposed=True)}
    if part not in _GATE_AND_UP:
        return {f"{block}.experts.down_proj.weight": stored}
    half = middle // 2
    return {
        f"{block}.experts.gate_proj.weight": AssembledTensor((stored,), (0, half)),
        f"{block}.experts.up_proj.weight": AssembledTensor((stored,), (half, middle)),
    }


def _join(name: str, experts: Mapping[int, str], tensors: Mapping[str, StoredTensor]) -> AssembledTensor:
    """Return the matrices of single experts as one tensor; `experts` has their names by the experts' numbers."""
    missing = next((each for each in range(len(experts)) if each not in experts), None)
    if missing is not None:
        message = f"expert {missing} lacks a tensor for {name!r}, which {len(experts)} others have"
        raise invalid("model_path", f"{message}; is the download complete?")
    stored = tuple(tensors[experts[each]] for each in range(len(experts)))
    first = stored[0]
    for number, each in enumerate(stored):
        if (each.dtype, each.shape) != (first.dtype, first.shape) or len(each.shape) != 2:
            raise invalid(
                "model_path",
                f"tensor {experts[number]!r} is {each.dtype} of shape {each.shape}, but {experts[0]!r} is "
                f"{first.dtype} of shape {first.shape}; all experts' must be alike, in two dimensions",
            )
    return AssembledTensor(stored, (0, first.shape[0]))


# -- the file


def write_assembled(
    tensors: Mapping[str, Weight], files: Sequence[Path], folder: Path, few_experts: int
) -> dict[str, Weight]:
    """Return the tensors of a checkpoint, which is in `files`, with the assembled ones from a file of their own. That
    is made in `folder` if missing: a kernel wants a tensor in one piece, and only what is in a file can release its
    memory. The matrices of `few_experts` or less stay apart if they are, as no kernel takes them together. Raises
    UNAVAILABLE if the folder cannot be written."""
    assembled = {
        name: each
        for name, each in tensors.items()
        if isinstance(each, AssembledTensor) and not (each.are_apart and each.num_matrices <= few_experts)
    }
    others = {name: each for name, each in tensors.items() if name not in assembled}
    if not assembled:
        return others
    path = folder / f"{files_key(files, _FORMAT)}.safetensors"
    if not path.is_file():
        started = time.monotonic()
        parts = [TensorPart(name, each.dtype, each.shape) for name, each in assembled.items()]
        write_tensors(path, parts, lambda output: _copy(output, assembled))
        seconds, mebibytes = time.monotonic() - started, path.stat().st_size >> 20
        logger.info("assembled weights in %.1f s: %s, %d MiB", seconds, path, mebibytes)
    return {**others, **map_tensors(path)}


def _copy(output: OutputTensors, assembled: Mapping[str, AssembledTensor]) -> None:
    for name, each in assembled.items():
        matrices = output[name].reshape(-1, *each.shape[-2:])
        for number in range(each.num_matrices):
            matrices[number] = each.matrix(number)


def stored_tensors(tensors: Iterable[Weight]) -> list[StoredTensor]:
    """Return the tensors, and for an assembled one those that it is made of."""
    return [part for each in tensors for part in (each.tensors if isinstance(each, AssembledTensor) else (each,))]
