"""Weights compressed to int8 or int4, as graph constants.

int8 is symmetric with one scale a row. int4 has a scale and a zero point for each GROUP weights; token
embeddings and head, which lose most and are read least, stay at int8, and so do rows that GROUP does not
divide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

from engine.runners.openvino.weights.quantize import GROUP
from engine.runners.openvino.weights.stored import FLOAT_TYPES, StoredTensor

INT8, INT4 = "int8", "int4"
NONE = "none"
QUANTIZATIONS = (INT8, INT4)
SCALES, ZEROS = ".scales", ".zeros"
"""What the tensors that go with the codes of NAME are called: NAME and one of these."""
_VOCABULARY = ("embed", "lm_head")


def code_kind(name: str, stored: StoredTensor, quantization: str) -> str | None:
    """int8 or int4 for a matrix that is compressed, None for a tensor that stays as it is."""
    if len(stored.shape) != 2 or stored.dtype not in FLOAT_TYPES or not name.endswith(".weight"):
        return None
    is_divided = stored.shape[1] % GROUP == 0
    return INT4 if quantization == INT4 and is_divided and not any(part in name for part in _VOCABULARY) else INT8


def pair_up(parts: Mapping[str, StoredTensor]) -> dict[str, "CompressedTensor"]:
    """The matrices whose codes, scales and zero points are `parts`."""
    names = (name.removesuffix(SCALES) for name in parts if name.endswith(SCALES))
    return {name: CompressedTensor(parts[name], parts[name + SCALES], parts.get(name + ZEROS)) for name in names}


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A matrix in codes with their scales, and zero points where it is in groups (int4)."""

    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's; two codes of int4 share a byte."""
        rows, columns = self.codes.shape
        return (rows, columns) if self.zeros is None else (rows, 2 * columns)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)

    def node(self, name: str) -> ov.Node:
        """The matrix as f32, in the spelling that the plugin keeps compressed: Convert, Subtract, Multiply, Reshape."""
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
