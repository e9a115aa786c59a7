"""Type names and numbers of the server, as numpy has them: the conversions of `pb_utils`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.tensors import byte_strings
from serving.tensors.datatypes import BYTES, DATA_TYPES, of_numpy

_NAMES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
NUMBER_OF = {name: number for number, name in enumerate(_NAMES, start=1)}
"""The server's number of each type of the protocol."""


TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    each.config_name: bool if each.name == "BOOL" else each.dtype.type for each in DATA_TYPES.values()
}
"""TYPE_FP32 and so on as numpy's scalar types."""


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """TYPE_FP32 and so on as numpy's scalar type. Raises KeyError for what is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The server's number of a type as numpy's scalar type; None for what is none."""
    if not 1 <= int(data_type) <= len(_NAMES):
        return None
    return DATA_TYPES[_NAMES[int(data_type) - 1]].dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """numpy's type or dtype as the server's number; None for what has none."""
    found = of_numpy(np.dtype(data_type))
    return NUMBER_OF[found.name] if found is not None else None


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """An array of strings in the protocol's wire form; () where it is empty, None where it holds no strings."""
    if input_tensor.size == 0:
        return ()
    if of_numpy(input_tensor.dtype) is not BYTES:
        return None
    return byte_strings.pack_array(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """The elements of a wire form, in one dimension. Raises ValueError where it ends within an element."""
    elements = byte_strings.unpack(encoded_tensor)
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array
