"""Memory that the server and a worker share: segments for large tensors, and a worker's progress.

Segments are anonymous files that both sides map, so that none outlives both. The side that sends owns its segments. It
copies a tensor into a free one, and gets it back when the other side no longer reads it. Each segment holds one tensor.
The server forwards a segment that one worker has sent to the next worker without a copy.
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

from sluice.serving.backends.python.frames import MAX_FDS, DroppedSegments, ForwardedSegment, NewSegments, SegmentRef

MAX_FREE_BYTES = 64 * 1024 * 1024
"""Most bytes of free segments that are kept. A segment whose pages were written before is faster to write."""
FORWARDABLE_BYTES = 4 * 1024 * 1024
"""Smallest segment whose file the server keeps, so that it can be forwarded."""
_MIN_SEGMENT_BYTES = 128 * 1024
_PROGRESS_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
SegmentNotice = tuple[NewSegments | ForwardedSegment, list[int]]
"""A frame, and the files that go with it."""


class MemoryMapping:
    """The first `size` bytes of a file, readable and writable. Unmapped when nothing refers to it or to its arrays.

    Python's own `mmap` would keep a file descriptor for each mapping.
    """

    def __init__(self, fd: int, size: int, is_private: bool = False, keeps_file: bool = False) -> None:
        """Writes to a private mapping are visible to nobody else. Raises OSError where there is no room.

        The caller may close its file afterwards; `keeps_file` keeps a duplicate in `fd`, so that the file can be
        forwarded.
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
            with suppress(OSError):  # too many open files: the segment will be copied instead of forwarded
                self.fd = os.dup(fd)

    def array(self, size: int) -> NDArray[Any]:
        """Return the first `size` bytes as a new array, which keeps the mapping."""
        return np.asarray(_MappedBytes(self, self._address, size))

    def __del__(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.size)
        if self.fd >= 0:
            os.close(self.fd)


class _MappedBytes:
    """Memory in the form that numpy takes. The arrays made of it keep it, and it keeps the mapping."""

    __slots__ = ("__array_interface__", "address", "mapping")

    def __init__(self, mapping: MemoryMapping, address: int | None, size: int) -> None:
        self.mapping = mapping
        self.address = address
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}


def find_mapping(array: NDArray[Any]) -> MemoryMapping | None:
    """Return the mapping that begins with the array's bytes and keeps its file; None where there is none."""
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, _MappedBytes) or owner.mapping.fd < 0:
        return None
    starts = array.ctypes.data == owner.address
    return owner.mapping if starts and array.flags.c_contiguous else None


class SegmentPool:
    """Segments of the sending side. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._maps: dict[int, MemoryMapping] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._free_bytes = 0
        self._next = 0
        self._new: list[tuple[int, int, int]] = []
        self._forwarded: dict[int, NDArray[Any]] = {}
        self._newly_forwarded: list[SegmentNotice] = []
        self._dropped: list[int] = []

    def store(self, data: NDArray[Any]) -> SegmentRef:
        """Store `[size] uint8`: forward its segment, else copy it. `take_notices` must be sent before the reference."""
        size = data.nbytes
        mapping = find_mapping(data)
        if mapping is not None:
            return self._forward(data, mapping)
        with self._lock:
            number = self._take_segment(max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length()))
            segment = self._maps[number]
        segment.array(size)[:] = data
        return SegmentRef(number, size)

    def _forward(self, data: NDArray[Any], mapping: MemoryMapping) -> SegmentRef:
        with self._lock:
            number = self._next
            self._next += 1
            self._newly_forwarded.append((ForwardedSegment(number, data.nbytes), [os.dup(mapping.fd)]))
            self._forwarded[number] = data  # keeps the segment from being freed to its owner
        return SegmentRef(number, data.nbytes)

    def has_free(self, size: int) -> bool:
        """Return whether there is a free segment for bytes of this size."""
        return bool(self._free[max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())])

    def _take_segment(self, capacity: int) -> int:
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
        """Take back segments that the other side no longer reads."""
        with self._lock:
            for number in numbers:
                if self._forwarded.pop(number, None) is not None:
                    continue
                capacity = self._maps[number].size
                if self._free_bytes + capacity > MAX_FREE_BYTES:
                    del self._maps[number]
                    self._dropped.append(number)
                else:
                    self._free[capacity].append(number)
                    self._free_bytes += capacity

    def drop_free(self) -> bool:
        """Drop the free segments, of which `take_notices` tells the other side. Returns whether there were any."""
        with self._lock:
            numbers = [number for free in self._free.values() for number in free]
            for number in numbers:
                del self._maps[number]
            self._dropped += numbers
            self._free.clear()
            self._free_bytes = 0
        return bool(numbers)

    def take_notices(self) -> tuple[list[SegmentNotice], DroppedSegments | None]:
        """Return new segments with their files, which the caller closes, and dropped ones, all to be sent at once."""
        if not self._new and not self._newly_forwarded and not self._dropped:
            return [], None
        with self._lock:
            new, self._new = self._new, []
            forwarded, self._newly_forwarded = self._newly_forwarded, []
            dropped, self._dropped = self._dropped, []
        groups = [new[start : start + MAX_FDS] for start in range(0, len(new), MAX_FDS)]
        segments: list[SegmentNotice] = [
            (
                NewSegments([number for number, _, _ in group], [size for _, size, _ in group]),
                [fd for _, _, fd in group],
            )
            for group in groups
        ]
        return segments + forwarded, DroppedSegments(dropped) if dropped else None

    def close(self) -> None:
        with self._lock:
            for _, _, fd in self._new:
                os.close(fd)
            for _, fds in self._newly_forwarded:
                os.close(fds[0])
            self._new, self._newly_forwarded = [], []
            self._forwarded.clear()
            self._maps.clear()
            self._free.clear()


class MappedSegments:
    """Segments of the other side, mapped by the receiving side.

    `freed` collects segments that are no longer read here, and `on_freed` is called then, both on the thread that
    released the last reader.
    """

    def __init__(self, on_freed: Callable[[], None], can_forward: bool = False) -> None:
        self._can_forward = can_forward
        self._maps: dict[int, MemoryMapping] = {}
        self._readers: dict[int, weakref.ref[NDArray[Any]]] = {}
        self._on_freed = on_freed
        self._single_use: set[int] = set()
        self.freed: deque[int] = deque()

    def add(self, segments: NewSegments, fds: deque[int]) -> None:
        """Map new segments. Takes their files out of `fds` and closes them."""
        for number, size in zip(segments.numbers, segments.sizes, strict=True):
            self._map(number, size, fds.popleft(), keeps_file=self._can_forward and size >= FORWARDABLE_BYTES)

    def add_forwarded(self, segment: ForwardedSegment, fds: deque[int]) -> None:
        """Map a segment of another worker, for one tensor."""
        self._map(segment.number, segment.size, fds.popleft(), is_private=True)
        self._single_use.add(segment.number)

    def _map(self, number: int, size: int, fd: int, is_private: bool = False, keeps_file: bool = False) -> None:
        try:
            self._maps[number] = MemoryMapping(fd, size, is_private, keeps_file)
        finally:
            os.close(fd)

    def read(self, ref: SegmentRef) -> memoryview:
        """Return the bytes without a copy. The segment is freed when their last view is gone."""
        array = self._maps[ref.segment].array(ref.size)
        if ref.segment in self._single_use:
            self._single_use.discard(ref.segment)
            del self._maps[ref.segment]
        number, readers, freed, on_freed = ref.segment, self._readers, self.freed, self._on_freed

        def free(_: object) -> None:
            readers.pop(number, None)
            freed.append(number)
            on_freed()

        readers[number] = weakref.ref(array, free)
        return array.data

    def drop(self, dropped: DroppedSegments) -> None:
        """Forget segments that will not be used again."""
        for number in dropped.numbers:
            self._readers.pop(number, None)
            self._maps.pop(number, None)

    def close(self) -> None:
        """Unmap what is not read, and the rest together with its last reader."""
        self._readers.clear()
        self._maps.clear()

    def take_freed(self) -> list[int]:
        numbers = []
        while self.freed:
            numbers.append(self.freed.popleft())
        return numbers


class BatchProgress:
    """Number of batches the model was given, in memory that outlives the worker.

    Written by the worker and read by the server, which gives batches that were not begun to another worker.
    """

    def __init__(self, fd: int) -> None:
        """Map the file that both sides have. The caller may close it afterwards."""
        self._count = MemoryMapping(fd, _PROGRESS_BYTES).array(_PROGRESS_BYTES).view(np.uint64)

    @property
    def num_begun(self) -> int:
        return int(self._count[0])

    def begin(self) -> None:
        """Count a batch that is about to be given to the model."""
        self._count[0] += 1


def create_progress_file() -> int:
    """Create a file for a worker that has begun no batch. The caller closes it."""
    fd = os.memfd_create("sluice-progress")
    os.ftruncate(fd, _PROGRESS_BYTES)
    return fd
