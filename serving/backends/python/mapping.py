"""Shared memory mapped without a file descriptor: Python's own `mmap` keeps one for each."""

import ctypes
import os
from contextlib import suppress
from mmap import MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """The first `size` bytes of a file, for reading and writing, until nobody refers to it or to an array of it."""

    def __init__(self, fd: int, size: int, is_private: bool = False, keeps_file: bool = False) -> None:
        """What is written to a private one nobody else sees. Raises OSError where there is no room.

        The caller may close its file afterwards; `keeps_file` keeps another one, for `mapping_of`'s caller to pass on.
        """
        self.size = size
        self.fd = -1
        self._address = None
        address = _libc.mmap(None, size, PROT_READ | PROT_WRITE, MAP_PRIVATE if is_private else MAP_SHARED, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address = address
        if keeps_file:
            with suppress(OSError):  # too many are open: then it cannot be passed on, and is copied
                self.fd = os.dup(fd)

    def array(self, size: int) -> NDArray[Any]:
        """The first bytes as a new array, which keeps the mapping."""
        return np.asarray(_Bytes(self, self._address, size))

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)
        if self.fd >= 0:
            os.close(self.fd)


def mapping_of(array: NDArray[Any]) -> Mapping | None:
    """The mapping that begins with the array's bytes, and whose file is kept; None where there is none."""
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, _Bytes) or owner.mapping.fd < 0:
        return None
    starts = array.ctypes.data == owner.address
    return owner.mapping if starts and array.flags.c_contiguous else None


class _Bytes:
    """Memory as numpy asks for it; it lives as long as the array that is made of it."""

    __slots__ = ("__array_interface__", "address", "mapping")

    def __init__(self, mapping: Mapping, address: int | None, size: int) -> None:
        self.mapping = mapping
        self.address = address
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}
