"""BYTES tensors for libraries whose strings are text."""

import numpy as np

from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Array


def text_array(array: Array) -> Array:
    """Elements as `str`. Raises UnicodeDecodeError."""
    decoded = np.empty(array.size, np.object_)
    decoded[:] = [element if isinstance(element, str) else element.decode() for element in array.ravel().tolist()]
    return decoded.reshape(array.shape)


def bytes_array(array: Array) -> Array:
    """Elements as `bytes`, from `str` or `bytes`."""
    encoded = np.empty(array.size, BYTES.dtype)
    encoded[:] = [element.encode() if isinstance(element, str) else element for element in array.ravel().tolist()]
    return encoded.reshape(array.shape)
