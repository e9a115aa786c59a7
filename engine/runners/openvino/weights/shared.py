"""Memory maps as OpenVINO tensors, without a copy."""

import mmap
from collections.abc import Sequence

import numpy as np
import openvino as ov

from sluice.engine.models.weights.mapped import StoredTensor

FLOAT_TYPES = {"BF16": ov.Type.bf16, "F16": ov.Type.f16, "F32": ov.Type.f32}
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
