"""Tensors of nothing: what a slot without a request shows its model, and what states begin as."""

from math import prod

import numpy as np

from serving.tensors.datatypes import BYTES, DataType
from serving.tensors.tensor import Tensor


def zeros(name: str, data_type: DataType, shape: tuple[int, ...]) -> Tensor:
    """Zeros, or empty strings."""
    if data_type is not BYTES:
        return Tensor(name, data_type.name, shape, array=np.zeros(shape, data_type.dtype))
    empty = np.empty(prod(shape), np.object_)
    empty[:] = b""
    return Tensor(name, data_type.name, shape, array=empty.reshape(shape))
