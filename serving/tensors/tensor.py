"""A named tensor, kept as it came: as wire bytes or as an array. The other form is made when first needed."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES, DataType, of_numpy

_VIEWED_BYTES = 1 << 20
"""Size from which the wire form of an array is a view of it: a copy takes long, and as much memory again."""
Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]


class Tensor:
    """A named tensor of the v2 protocol. Treat it as immutable: ensembles pass one object to several models.

    `datatype` is the protocol's name (FP32, BYTES …); `shape` includes the batch dimension where the model has one.
    """

    __slots__ = ("_array", "_raw", "datatype", "name", "shape")

    def __init__(
        self, name: str, datatype: str, shape: Sequence[int], raw: Buffer | None = None, array: Array | None = None
    ) -> None:
        """Take wire bytes (little-endian, C order, BYTES length-prefixed) or an array of the type's dtype.

        Nothing is checked or copied. A caller that does not trust `raw` calls `check_size`.
        """
        self.name = name
        self.datatype = datatype
        self.shape = tuple(shape)
        self._raw = raw
        self._array = array

    @classmethod
    def of(cls, name: str, array: Array) -> "Tensor":
        """Return a tensor of the array's type. Raises ValueError for a dtype that the protocol lacks."""
        data_type = of_numpy(array.dtype)
        if data_type is None:
            raise ValueError(f"the protocol has no type for arrays of {array.dtype}")
        return cls(name, data_type.name, array.shape, array=array)

    @classmethod
    def zeros(cls, name: str, data_type: DataType, shape: Sequence[int]) -> "Tensor":
        """Return a tensor of zeros, or of empty strings."""
        array = np.full(shape, b"", np.object_) if data_type is BYTES else np.zeros(shape, data_type.dtype)
        return cls(name, data_type.name, shape, array=array)

    @property
    def data_type(self) -> DataType:
        return DATA_TYPES[self.datatype]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def raw(self) -> Buffer:
        """The wire form."""
        if self._raw is None:
            assert self._array is not None
            if self.data_type is BYTES:
                self._raw = byte_strings.pack_array(self._array)
            else:
                flat = np.ascontiguousarray(self._array, self.data_type.dtype).reshape(-1)
                self._raw = flat.tobytes() if flat.nbytes < _VIEWED_BYTES else flat.view(np.uint8).data.toreadonly()
        return self._raw

    @property
    def size_bytes(self) -> int:
        """Size of the wire form."""
        itemsize = self.data_type.itemsize
        return itemsize * self.num_elements if itemsize else len(memoryview(self.raw).cast("B"))

    @property
    def array(self) -> Array:
        """The numpy array, in `shape`; BYTES is an object array of `bytes`, BF16 has ml_dtypes' dtype.

        It may be a read-only view of the wire bytes. Raises ValueError where the bytes do not fit the shape.
        """
        if self._array is None:
            assert self._raw is not None
            if self.data_type is BYTES:
                self._array = byte_strings.object_array(byte_strings.unpack(self._raw, self.num_elements), self.shape)
            else:
                self._array = np.frombuffer(self._raw, self.data_type.dtype).reshape(self.shape)
        return self._array

    def strings(self) -> Iterator[bytes | memoryview | str]:
        """Yield the elements of a BYTES tensor in order, without copying them. Raises ValueError like `array`."""
        if self._array is not None:
            return iter(self._array.flat)
        assert self._raw is not None
        return byte_strings.views(self._raw, self.num_elements)

    def renamed(self, name: str) -> "Tensor":
        """Return the same value under another name, without a copy."""
        return Tensor(name, self.datatype, self.shape, self._raw, self._array)

    def reshaped(self, shape: Sequence[int]) -> "Tensor":
        """Return the same elements in another shape, without a copy where the array is contiguous."""
        array = None if self._array is None else self._array.reshape(shape)
        return Tensor(self.name, self.datatype, shape, self._raw, array)

    def check_size(self) -> None:
        """Raise ValueError where the wire bytes do not fit type and shape."""
        if self._raw is None or self._array is not None:
            return
        data_type, actual = self.data_type, len(memoryview(self._raw).cast("B"))
        if data_type is not BYTES:
            expected = data_type.itemsize * self.num_elements
            if actual != expected:
                raise ValueError(f"expected {expected} bytes, got {actual}")
            return
        found = byte_strings.count(self._raw, self.num_elements)
        if found != self.num_elements:
            raise ValueError(f"expected {self.num_elements} string elements, got {found}")

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype}, {list(self.shape)})"


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape as Triton's messages have it: [1,-1]."""
    return f"[{','.join(map(str, shape))}]"
