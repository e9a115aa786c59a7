"""Memory maps seen as OpenVINO tensors."""

import mmap
from collections.abc import Sequence

import numpy as np
import openvino as ov

_ELEMENTS = {1: np.uint8, 2: np.float16, 4: np.float32}


def shared_tensor(memory: mmap.mmap, offset: int, size_bytes: int, kind: ov.Type, shape: Sequence[int]) -> ov.Tensor:
    """`size_bytes` of `memory` from `offset` as a tensor, without a copy.

    The tensor does not keep the map alive: its owner must.
    """
    # numpy has no bf16 and no 4-bit types; OpenVINO only compares the element's size with that of its own type.
    element = np.dtype(_ELEMENTS[kind.size])
    flat = np.frombuffer(memory, element, size_bytes // kind.size, offset)
    return ov.Tensor(flat, ov.Shape(list(shape)), kind)
