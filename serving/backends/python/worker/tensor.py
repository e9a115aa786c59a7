"""`pb_utils.Tensor`, and the conversions of `pb_utils` between types of numpy and of the server."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.serving.backends.python.worker.errors import TritonModelException, check_str
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES, DataType, of_numpy

Array = NDArray[Any]
_TYPES: dict[np.dtype, DataType] = {each.dtype: each for each in DATA_TYPES.values()}
_NAMES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
NUMBER_OF = {name: number for number, name in enumerate(_NAMES, start=1)}
"""Triton's number of each type of the protocol."""
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    each.config_name: bool if each.name == "BOOL" else each.dtype.type for each in DATA_TYPES.values()
}
"""Scalar types of numpy by the types of config.pbtxt, as in TYPE_FP32."""


class PbTensor:
    """A named array. An input's belongs to the model, which may write to it and keep it after the request."""

    __slots__ = ("_array", "_name", "_raw", "_shape", "_type")

    def __init__(self, name: str, array: Array) -> None:
        """Raises TypeError for what is not an array, TritonModelException for a dtype that the protocol lacks."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name!s}' takes a numpy.ndarray, not {type(array).__name__}")
        self._name = name if type(name) is str and name.isascii() else check_str(name, "the name of a Tensor")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        data_type = _TYPES.get(array.dtype) or of_numpy(array.dtype)
        if data_type is None:
            raise TritonModelException("NumPy dtype is not supported.")
        self._type = data_type
        self._shape = array.shape
        self._raw: bytes | memoryview | None = None
        self._array: Array | None = array

    @classmethod
    def from_wire(cls, name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> "PbTensor":
        """Make a tensor of wire bytes that fit. A memoryview is shared memory, which lives as long as the tensor."""
        self = cls.__new__(cls)
        self._name, self._type, self._shape, self._raw, self._array = name, DATA_TYPES[datatype], shape, raw, None
        return self

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._shape)

    def triton_dtype(self) -> int:
        return NUMBER_OF[self._type.name]

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> Array:
        """Return the array. BYTES is an object array of `bytes`, BF16 has the dtype of ml_dtypes."""
        if self._array is None:
            assert self._raw is not None
            self._array = _read_array(self._raw, self._type, self._shape)
        return self._array

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        if self._type is BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return self.as_numpy().__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @classmethod
    def from_dlpack(cls, name: str, value: Any) -> "PbTensor":
        """Make a tensor that shares the memory of a DLPack capsule or provider, which must be the CPU's."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if value is None:
            raise TritonModelException("from_dlpack takes a DLPack capsule, or an object that gives one, not None.")
        if isinstance(value, PbTensor) and value._type is not BYTES:  # numpy's DLPack lacks BF16
            return cls(name, value.as_numpy())
        if not hasattr(value, "__dlpack__"):
            value = _Capsule(value)
        return cls(name, np.from_dlpack(value))

    def wire_form(self) -> bytes | memoryview:
        """Return the tensor in the protocol's wire form, without a copy where possible."""
        array = self._array
        if array is None:
            assert self._raw is not None
            return self._raw
        if self._type is BYTES:
            return self._pack(array)
        if array.dtype is self._type.dtype and array.nbytes < 1024:
            return array.tobytes()
        return np.ascontiguousarray(array, self._type.dtype).reshape(-1).view(np.uint8).data

    def _pack(self, array: Array) -> bytes:
        try:
            return byte_strings.pack_array(array)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a string of Tensor '{self._name}' must be text that UTF-8 can encode, not {error.object!r}"
            ) from None

    @property
    def datatype(self) -> str:
        """The protocol's name of the tensor's type."""
        return self._type.name

    def __repr__(self) -> str:
        return f"Tensor({self._name!r}, {self._type.name}, {list(self._shape)})"


PbTensor.__name__ = "Tensor"  # the name that models know it by, in messages too


def check_tensors(given: Any, what: str) -> list[PbTensor]:
    """Return the tensors as a list. Raises TypeError for other objects, as Triton TritonModelException for None."""
    found = list(given)
    for each in found:
        if each is None:
            raise TritonModelException(f"{what} are a list of Tensor, and None is found")
        if not isinstance(each, PbTensor):
            raise TypeError(f"{what} are a list of Tensor, and {type(each).__name__} is found")
    return found


class _Capsule:
    """Makes a bare capsule of CPU memory acceptable to numpy."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _read_array(raw: bytes | memoryview, data_type: DataType, shape: tuple[int, ...]) -> Array:
    if data_type is BYTES:
        return byte_strings.object_array(byte_strings.unpack(raw), shape)
    own = bytearray(raw) if isinstance(raw, bytes) else raw
    return np.frombuffer(own, data_type.dtype).reshape(shape)


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return numpy's scalar type for a type of config.pbtxt, as TYPE_FP32. Raises KeyError for an unknown one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return numpy's scalar type for Triton's number of a type; None for an unknown one."""
    if not 1 <= int(data_type) <= len(_NAMES):
        return None
    return DATA_TYPES[_NAMES[int(data_type) - 1]].dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return Triton's number for numpy's type or dtype; None where it has none."""
    found = of_numpy(np.dtype(data_type))
    return NUMBER_OF[found.name] if found is not None else None


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Return an array of strings in the protocol's wire form; () where it is empty, None where it has no strings."""
    if input_tensor.size == 0:
        return ()
    if of_numpy(input_tensor.dtype) is not BYTES:
        return None
    return byte_strings.pack_array(input_tensor)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """Return the elements of a wire form, in one dimension. Raises ValueError where it ends within an element."""
    elements = byte_strings.unpack(encoded_tensor)
    return byte_strings.object_array(elements, (len(elements),))
