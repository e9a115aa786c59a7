"""BYTES tensors on the wire: each element follows its length, a little-endian uint32."""

from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

MAX_ELEMENTS = 1 << 18
"""Most elements of a tensor that a client may send: libraries hold the interpreter's lock while they convert it."""
_LENGTH = Struct("<I")


def pack(elements: Iterable[bytes]) -> bytes:
    """Return the wire form of `elements`, in order."""
    pieces: list[bytes] = []
    for element in elements:
        pieces.append(_LENGTH.pack(len(element)))
        pieces.append(element)
    return b"".join(pieces)


def unpack(raw: bytes | bytearray | memoryview, most: int | None = None) -> list[bytes]:
    """Return the elements of a wire form. Raises ValueError where it ends within an element or has over `most`."""
    data = bytes(raw)
    read_length = _LENGTH.unpack_from
    elements: list[bytes] = []
    start, end = 0, len(data)
    while start < end:
        if start + _LENGTH.size > end:
            raise ValueError(f"{end - start} bytes are left where a length of {_LENGTH.size} bytes is expected")
        (length,) = read_length(data, start)
        start += _LENGTH.size
        if start + length > end:
            raise ValueError(f"an element of {length} bytes is announced, and {end - start} bytes are left")
        if len(elements) == most:
            raise ValueError(f"there are more than {most} elements")
        elements.append(data[start : start + length])
        start += length
    return elements


def pack_array(array: "NDArray[np.object_] | NDArray[np.bytes_] | NDArray[np.str_]") -> bytes:
    """Return the wire form of an array in C order. Elements other than `bytes` are encoded as `str` in UTF-8."""
    return pack(as_bytes(element) for element in array.ravel().tolist())


def object_array(elements: Sequence[object], shape: Sequence[int]) -> "NDArray[np.object_]":
    """Return an object array of the elements, whatever their types: numpy would make arrays of strings."""
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def as_bytes(element: object) -> bytes:
    """Return an element as `bytes`, encoding the `str` of any other in UTF-8."""
    return element if isinstance(element, bytes) else str(element).encode()
