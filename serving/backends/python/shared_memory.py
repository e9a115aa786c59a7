"""Shared memory for large tensors: anonymous files that both sides map, so that none outlives both of them.

The side that sends owns its segments: it copies a tensor into a free one, and takes it back when the other side says
that nobody reads it any more. Each segment holds one tensor. What one worker has sent, the gateway lends to the next
one as it is: a tensor between two models is not copied there.
"""

import ctypes
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.backends.python.frames import MAX_FDS, DroppedSegments, ForwardedSegment, NewSegments, SegmentRef

MAX_FREE_BYTES = 64 * 1024 * 1024
"""Free segments beyond this are given back; pages that were written once are what makes the next copy fast."""
FORWARDABLE_BYTES = 4 * 1024 * 1024
"""Segments from this size on keep their file in the gateway, so that they can be lent."""
_SMALLEST = 128 * 1024
_SIZE = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
SegmentNotice = tuple[NewSegments | ForwardedSegment, list[int]]
"""A frame, and the files that go with it."""


class MemoryMapping:
    """The first `size` bytes of a file, for reading and writing, until nobody refers to it or to an array of it."""

    def __init__(self, fd: int, size: int, is_private: bool = False, keeps_file: bool = False) -> None:
        """What is written to a private one nobody else sees. Raises OSError where there is no room.

        The caller may close its file afterwards; `keeps_file` keeps another one, for `find_mapping`'s caller to pass on.
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


class _Bytes:
    """Memory as numpy asks for it; it lives as long as the array that is made of it."""

    __slots__ = ("__array_interface__", "address", "mapping")

    def __init__(self, mapping: MemoryMapping, address: int | None, size: int) -> None:
        self.mapping = mapping
        self.address = address
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}


def find_mapping(array: NDArray[Any]) -> MemoryMapping | None:
    """The mapping that begins with the array's bytes, and whose file is kept; None where there is none."""
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, _Bytes) or owner.mapping.fd < 0:
        return None
    starts = array.ctypes.data == owner.address
    return owner.mapping if starts and array.flags.c_contiguous else None


class SegmentPool:
    """The sending side's segments. Any thread."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._maps: dict[int, MemoryMapping] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._free_bytes = 0
        self._next = 0
        self._new: list[tuple[int, int, int]] = []
        self._lent: dict[int, NDArray[Any]] = {}
        self._newly_lent: list[SegmentNotice] = []
        self._dropped: list[int] = []

    def store(self, data: NDArray[Any]) -> SegmentRef:
        """Bytes `[size] uint8` in a segment: lent where they lie in one, else copied. `news` is to be sent before."""
        size = data.nbytes
        mapping = find_mapping(data)
        if mapping is not None:
            return self._lend(data, mapping)
        with self._lock:
            number = self._take(max(_SMALLEST, 1 << (size - 1).bit_length()))
            segment = self._maps[number]
        segment.array(size)[:] = data
        return SegmentRef(number, size)

    def _lend(self, data: NDArray[Any], mapping: MemoryMapping) -> SegmentRef:
        with self._lock:
            number = self._next
            self._next += 1
            self._newly_lent.append((ForwardedSegment(number, data.nbytes), [os.dup(mapping.fd)]))
            self._lent[number] = data  # its owner does not use the segment again until this is gone
        return SegmentRef(number, data.nbytes)

    def has_free(self, size: int) -> bool:
        """Whether bytes of this size would find a segment that is there already."""
        return bool(self._free[max(_SMALLEST, 1 << (size - 1).bit_length())])

    def _take(self, capacity: int) -> int:
        free = self._free[capacity]
        if free:
            self._free_bytes -= capacity
            return free.pop()
        fd = os.memfd_create("sluice-tensor")
        try:
            os.ftruncate(fd, capacity)
            mapping = MemoryMapping(fd, capacity)
        except OSError:
            os.close(fd)
            raise
        number = self._next
        self._next += 1
        self._maps[number] = mapping
        self._new.append((number, capacity, fd))
        return number

    def free(self, numbers: list[int]) -> None:
        """The other side has finished with these."""
        with self._lock:
            for number in numbers:
                if self._lent.pop(number, None) is not None:
                    continue
                capacity = self._maps[number].size
                if self._free_bytes + capacity > MAX_FREE_BYTES:
                    del self._maps[number]
                    self._dropped.append(number)
                else:
                    self._free[capacity].append(number)
                    self._free_bytes += capacity

    def news(self) -> tuple[list[SegmentNotice], DroppedSegments | None]:
        """What the other side must hear first: new segments with their files, which the caller closes; lost ones."""
        if not self._new and not self._newly_lent and not self._dropped:
            return [], None
        with self._lock:
            new, self._new = self._new, []
            lent, self._newly_lent = self._newly_lent, []
            dropped, self._dropped = self._dropped, []
        groups = [new[start : start + MAX_FDS] for start in range(0, len(new), MAX_FDS)]
        segments: list[SegmentNotice] = [
            (
                NewSegments([number for number, _, _ in group], [size for _, size, _ in group]),
                [fd for _, _, fd in group],
            )
            for group in groups
        ]
        return segments + lent, DroppedSegments(dropped) if dropped else None

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            for _, _, fd in self._new:
                os.close(fd)
            for _, fds in self._newly_lent:
                os.close(fds[0])
            self._new, self._newly_lent = [], []
            self._lent.clear()
            self._maps.clear()
            self._free.clear()


class MappedSegments:
    """The receiving side's view of the other's segments.

    `freed` collects those that nobody here reads any more, on whatever thread let the last reader go; `on_freed` is
    called then, on that thread too.
    """

    def __init__(self, on_freed: Callable[[], None], can_lend: bool = False) -> None:
        self._can_lend = can_lend
        self._maps: dict[int, MemoryMapping] = {}
        self._readers: dict[int, weakref.ref[NDArray[Any]]] = {}
        self._on_freed = on_freed
        self._borrowed: set[int] = set()
        self.freed: deque[int] = deque()

    def add(self, segments: NewSegments, fds: deque[int]) -> None:
        """Map new ones; takes their files out of `fds` and closes them."""
        for number, size in zip(segments.numbers, segments.sizes, strict=True):
            self._map(number, size, fds.popleft(), keeps_file=self._can_lend and size >= FORWARDABLE_BYTES)

    def add_lent(self, lent: ForwardedSegment, fds: deque[int]) -> None:
        """Map one that is another worker's, until its tensor is gone."""
        self._map(lent.number, lent.size, fds.popleft(), is_private=True)
        self._borrowed.add(lent.number)

    def _map(self, number: int, size: int, fd: int, is_private: bool = False, keeps_file: bool = False) -> None:
        try:
            self._maps[number] = MemoryMapping(fd, size, is_private, keeps_file)
        finally:
            os.close(fd)

    def read(self, stored: SegmentRef) -> memoryview:
        """The bytes, shared and not copied; the segment is freed when the last view of them is gone."""
        array = self._maps[stored.segment].array(stored.size)
        if stored.segment in self._borrowed:
            self._borrowed.discard(stored.segment)
            del self._maps[stored.segment]
        number, readers, freed, on_freed = stored.segment, self._readers, self.freed, self._on_freed

        def free(_: object) -> None:
            readers.pop(number, None)
            freed.append(number)
            on_freed()

        readers[number] = weakref.ref(array, free)
        return array.data

    def drop(self, dropped: DroppedSegments) -> None:
        """Forget segments that will not come again."""
        for number in dropped.numbers:
            self._readers.pop(number, None)
            self._maps.pop(number, None)

    def close(self) -> None:
        """Unmap what nobody reads, and the rest with its last reader."""
        self._readers.clear()
        self._maps.clear()

    def take_freed(self) -> list[int]:
        """Those freed since the last call."""
        numbers = []
        while self.freed:
            numbers.append(self.freed.popleft())
        return numbers


class BatchProgress:
    """How many batches the model was given. Written by the worker, read by the gateway."""

    def __init__(self, fd: int) -> None:
        """In the file that the other side has too; the caller may close it afterwards."""
        self._count = MemoryMapping(fd, _SIZE).array(_SIZE).view(np.uint64)

    @property
    def num_begun(self) -> int:
        return int(self._count[0])

    def begin(self) -> None:
        """One more is about to be given to the model."""
        self._count[0] += 1


def create_progress_file() -> int:
    """A file for a worker that has begun nothing; the caller closes it."""
    fd = os.memfd_create("sluice-progress")
    os.ftruncate(fd, _SIZE)
    return fd
