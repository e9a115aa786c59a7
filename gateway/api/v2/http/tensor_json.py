"""Tensors as JSON: parses the `data` of requests, and encodes that of responses."""

import json
import re
from array import array
from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.json_document import (
    MAX_DATA_DEPTH,
    ArrayText,
    is_signed,
    mistyped,
    too_deep,
    unreadable,
)
from sluice.gateway.front.long_work import PIECE_ELEMENTS
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES, DataType
from sluice.serving.tensors.tensor import Array, Tensor

_BINARY_ONLY = ("FP16", "BF16")
_MIN_NUMPY_ELEMENTS = 64
"""Number of elements from which orjson encodes an array faster than a list."""
_DATA = "Unable to parse 'data': "
_TOO_MANY = _DATA + "Shape does not match true shape of 'data' field"
_TOO_FEW = "Failed to parse 'data' field: shape does not match true shape"
_SIGNED, _UNSIGNED, _FLOAT = (
    ("INT8", "INT16", "INT32", "INT64"),
    ("UINT8", "UINT16", "UINT32", "UINT64"),
    ("FP32", "FP64"),
)
_TYPE_CODES = {
    "BOOL": "B",
    **dict(zip(_SIGNED, "bhiq", strict=True)),
    **dict(zip(_UNSIGNED, "BHIQ", strict=True)),
    **dict(zip(_FLOAT, "fd", strict=True)),
}
_JSON_TYPES: dict[str, frozenset[type]] = {
    "BOOL": frozenset((bool,)),
    **dict.fromkeys((*_SIGNED, *_UNSIGNED), frozenset((int,))),
    **dict.fromkeys(_FLOAT, frozenset((float, int))),
}
_TRITON_WORDS = {
    "BOOL": "boolean",
    **dict.fromkeys(_SIGNED, "signed-integer"),
    **dict.fromkeys(_UNSIGNED, "unsigned-integer"),
    **dict.fromkeys(_FLOAT, "double"),
}
_ESCAPES = {ord('"'): b'\\"', ord("\\"): b"\\\\", 8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r"}
_TO_ESCAPE = re.compile(rb'[\x00-\x1f"\\]')


def parse_tensor(name: str, datatype: str, shape: tuple[int, ...], data: object, num_elements: int) -> Tensor:
    """Return the tensor whose `num_elements` elements are in `data`, nested in any way. They need not fit `shape`.

    Raises SluiceError: INTERNAL for elements of another type or another number of them, INVALID for numbers that the
    type cannot hold, and for types that JSON cannot carry.
    """
    if datatype in _BINARY_ONLY:
        text = (
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
        raise invalid(name, text)
    data_type = DATA_TYPES.get(datatype)
    if data_type is None:
        raise invalid(name, f"invalid datatype for input {name}")
    if isinstance(data, ArrayText):
        return _parse_long(name, data_type, shape, data, num_elements)
    elements, kinds = _flatten(data)
    if datatype == "BYTES":
        return _parse_bytes(name, shape, elements, kinds)
    if len(elements) != num_elements or not _are_all(datatype, elements, kinds):
        raise _misfit(datatype, elements, num_elements)
    return Tensor(name, datatype, shape, _pack(name, data_type, elements))


def _parse_long(name: str, data_type: DataType, shape: tuple[int, ...], text: ArrayText, num_elements: int) -> Tensor:
    """Return the tensor like `parse_tensor`, for an array too long to be a list."""
    packed, num_found = bytearray(), 0
    for piece in text.pieces():
        elements, kinds = _flatten(piece)
        if data_type is BYTES:
            _check_strings(kinds)
            packed += byte_strings.pack(_encode_texts(elements))
        else:
            if not _are_all(data_type.name, elements, kinds):
                raise _misfit(data_type.name, elements, num_elements - num_found)
            packed += _pack(name, data_type, elements)
        num_found += len(elements)
        if num_found > num_elements or (data_type is BYTES and num_found > byte_strings.MAX_ELEMENTS):
            break
    if num_found != num_elements and data_type is not BYTES:
        raise unreadable(_TOO_FEW if num_found < num_elements else _TOO_MANY)
    return Tensor(name, data_type.name, shape, packed)


def count_elements(data: object) -> int:
    """Return how many elements a generate request's input has: a single value counts as an array of one."""
    if isinstance(data, ArrayText):
        if data.is_nested:
            raise unreadable(_TOO_MANY)
        return sum(map(len, data.pieces()))
    return len(data) if isinstance(data, list) else 1


def check_strings(data: object) -> None:
    """Raise INTERNAL where `data` holds, at any depth, anything but strings."""
    if not isinstance(data, str | ArrayText):
        _check_strings(_flatten(data)[1])


def _check_strings(kinds: set[type]) -> None:
    if not kinds <= {str}:
        raise unreadable("Unable to parse JSON bytes array: " + mistyped("string"))


def _flatten(data: object) -> tuple[list[Any], set[type]]:
    """Return the elements of nested arrays in order, and their types. A single value counts as an array.

    Raises INVALID for MAX_DATA_DEPTH or more arrays inside each other.
    """
    elements: list[Any] = data if isinstance(data, list) else [data]
    kinds = set(map(type, elements))
    depth = 1
    while kinds == {list} and depth < MAX_DATA_DEPTH:
        elements = list(chain.from_iterable(elements))
        kinds = set(map(type, elements))
        depth += 1
    if list in kinds:
        elements = list(_leaves(elements, depth))
        kinds = set(map(type, elements))
    if depth >= MAX_DATA_DEPTH:
        raise too_deep()
    return elements, kinds


def _leaves(data: list[Any], depth: int) -> Iterator[Any]:
    """Yield what is in arrays of any depth; `data` is itself at `depth`."""
    todo = [iter(data)]
    while todo:
        for each in todo[-1]:
            if not isinstance(each, list):
                yield each
            elif len(todo) + depth >= MAX_DATA_DEPTH:
                raise too_deep()
            else:
                todo.append(iter(each))
                break
        else:
            todo.pop()


def _are_all(datatype: str, elements: list[Any], kinds: set[type]) -> bool:
    if not kinds <= _JSON_TYPES[datatype]:
        return False
    return datatype not in _UNSIGNED or not elements or min(elements) >= 0


def _misfit(datatype: str, elements: list[Any], num_elements: int) -> SluiceError:
    """Return Triton's error: it reads element by element, so the first fault decides the message."""
    for element in elements[:num_elements]:
        if not _are_all(datatype, [element], {type(element)}):
            return unreadable(_DATA + mistyped(_TRITON_WORDS[datatype]))
    return unreadable(_TOO_FEW if len(elements) < num_elements else _TOO_MANY)


def _pack(name: str, data_type: DataType, elements: list[Any]) -> bytes:
    """Pack the elements; few take a quarter of numpy's time. What exceeds FP32 becomes infinite, as in Triton."""
    try:
        return array(_TYPE_CODES[data_type.name], elements).tobytes()
    except OverflowError:
        raise _overflow(name, data_type, elements) from None


def _overflow(name: str, data_type: DataType, elements: list[Any]) -> SluiceError:
    """Return the error for a number that does not fit. Triton wraps it; only beyond 64 bits are the words Triton's."""
    if data_type.dtype.kind == "f":
        return unreadable("failed to parse the request JSON buffer: Number too big to be stored in double.")
    is_wide = is_signed if data_type.name in _SIGNED else lambda value: value < 2**64
    if not all(map(is_wide, elements)):
        return unreadable(_DATA + mistyped(_TRITON_WORDS[data_type.name]))
    limits = np.iinfo(data_type.dtype)
    worst = next(value for value in elements if not limits.min <= value <= limits.max)
    return invalid(name, f"value {worst} of input '{name}' does not fit {data_type.name}")


def _parse_bytes(name: str, shape: tuple[int, ...], elements: list[Any], kinds: set[type]) -> Tensor:
    _check_strings(kinds)
    encoded = _encode_texts(elements)
    if len(encoded) != prod(shape):
        return Tensor(name, "BYTES", shape, byte_strings.pack(encoded))
    strings: NDArray[np.object_] = np.empty(len(encoded), np.object_)
    strings[:] = encoded
    return Tensor(name, "BYTES", shape, array=strings.reshape(shape))


def _encode_texts(elements: list[str]) -> list[bytes]:
    try:
        return [element.encode("utf-8", "surrogateescape") for element in elements]
    except UnicodeEncodeError:
        raise unreadable("failed to parse the request JSON buffer: The surrogate pair in string is invalid.") from None


def encode_data(tensor: Tensor) -> bytes:
    """Return a response's `data`: all elements in one flat array. Raises INVALID for types that JSON cannot carry."""
    return b"".join(encode_pieces(tensor))


def encode_pieces(tensor: Tensor) -> list[bytes]:
    """Return and raise like `encode_data`, but in pieces, each of which takes a few milliseconds."""
    if tensor.datatype in _BINARY_ONLY:
        text = f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format for output"
        raise SluiceError(ErrorCode.INVALID, text)
    flat = tensor.array.ravel()
    if flat.size <= PIECE_ELEMENTS:
        return [_encode_flat(flat)]
    pieces = []
    for start in range(0, flat.size, PIECE_ELEMENTS):
        pieces += [b",", _encode_flat(flat[start : start + PIECE_ELEMENTS])[1:-1]]
    return [b"[", *pieces[1:], b"]"]


def _encode_flat(flat: Array) -> bytes:
    if flat.dtype == np.object_:
        return _encode_strings(flat.tolist())
    is_float = flat.dtype.kind == "f"
    if flat.size < _MIN_NUMPY_ELEMENTS:
        text_form = orjson.dumps(flat.tolist())
    else:
        # FP32 is printed as the double that it widens to, as Triton does.
        wide = flat.astype(np.float64) if is_float else np.ascontiguousarray(flat)
        text_form = orjson.dumps(wide, option=orjson.OPT_SERIALIZE_NUMPY)
    if is_float and b"null" in text_form:  # how orjson writes NaN and infinities
        return json.dumps(flat.tolist(), separators=(",", ":")).encode()
    return text_form


def encode_value(tensor: Tensor) -> bytes:
    """Return an output's value in a generate response: a single element stands without its array."""
    data = encode_data(tensor)
    return data[1:-1] if tensor.num_elements == 1 else data


def _encode_strings(elements: list[bytes]) -> bytes:
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError:
        return b"[" + b",".join(map(_encode_string, elements)) + b"]"


def _encode_string(element: bytes) -> bytes:
    """Encode bytes that are no UTF-8 unchanged, as Triton sends them."""
    return b'"' + _TO_ESCAPE.sub(_escape, element) + b'"'


def _escape(match: re.Match[bytes]) -> bytes:
    (byte,) = match[0]
    return _ESCAPES.get(byte) or b"\\u%04X" % byte
