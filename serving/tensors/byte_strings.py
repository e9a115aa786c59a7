"""BYTES tensors on the wire: each element follows its length, a little-endian uint32."""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

import numpy as np
from numpy.typing import NDArray

MAX_ELEMENTS = 1 << 18
"""Most elements of a tensor that a client may send: libraries hold the interpreter's lock while they convert it."""
_LENGTH = Struct("<I")
_LONG_BYTES = 1 << 20
"""Size from which another copy takes long."""


def pack(elements: Iterable[bytes]) -> bytes:
    """Return the wire form of `elements`, in order."""
    pieces: list[bytes] = []
    for element in elements:
        pieces.append(_LENGTH.pack(len(element)))
        pieces.append(element)
    return b"".join(pieces)


def pack_one(element: bytes | bytearray | memoryview) -> memoryview:
    """Return the wire form of one element. numpy copies a long one without the interpreter's lock."""
    packed = np.empty(_LENGTH.size + len(element), np.uint8)
    packed[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(element)), np.uint8)
    packed[_LENGTH.size :] = np.frombuffer(element, np.uint8)
    return packed.data.toreadonly()


def unpack(raw: bytes | bytearray | memoryview, most: int | None = None) -> list[bytes]:
    """Return the elements of a wire form. Raises ValueError where it ends within an element or has over `most`."""
    if len(raw) > _LONG_BYTES:
        return [bytes(element) for element in views(raw, most)]
    data = bytes(raw)  # slices of bytes take less time than views
    return [data[start:end] for start, end in _spans(data, most)]


def views(raw: bytes | bytearray | memoryview, most: int | None = None) -> Iterator[memoryview]:
    """Yield the elements without a copy. Raises like `unpack`."""
    view = memoryview(raw).cast("B")
    for start, end in _spans(view, most):
        yield view[start:end]


def count(raw: bytes | bytearray | memoryview, most: int) -> int:
    """Return how many elements a wire form has, without a copy. Raises like `unpack`."""
    return sum(1 for _ in _spans(raw, most))


def _spans(data: bytes | bytearray | memoryview, most: int | None) -> Iterator[tuple[int, int]]:
    """Yield where each element starts and ends. Raises like `unpack`."""
    read_length = _LENGTH.unpack_from
    num_found, start, end = 0, 0, len(data)
    while start < end:
        if start + _LENGTH.size > end:
            raise ValueError(f"{end - start} bytes are left where a length of {_LENGTH.size} bytes is expected")
        (length,) = read_length(data, start)
        start += _LENGTH.size
        if start + length > end:
            raise ValueError(f"an element of {length} bytes is announced, and {end - start} bytes are left")
        if num_found == most:
            raise ValueError(f"there are more than {most} elements")
        num_found += 1
        yield start, start + length
        start += length


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
