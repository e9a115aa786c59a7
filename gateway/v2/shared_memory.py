"""POSIX shared memory that clients register: tensors lie there, and requests only name their places."""

import mmap
import os
import stat
from dataclasses import dataclass

from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

_FOLDER = "/dev/shm"
"""Folder of the objects that `shm_open` opens on Linux."""


@dataclass(frozen=True, slots=True)
class Region:
    """A registered part of the shared memory object `key`: `byte_size` bytes from `offset` on, under a name."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemoryRegistry:
    """Registered regions, by name. Event loop's thread only.

    Memory from `read` and `window` stays mapped while somebody holds the view, whatever is unregistered meanwhile.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, _MappedRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a region.

        Raises ALREADY_EXISTS for a known name, INTERNAL where `key` cannot be opened, INVALID for a region that
        exceeds it.
        """
        if name in self._mapped:
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        self._mapped[name] = _MappedRegion(Region(name, key, offset, byte_size))

    def unregister(self, name: str) -> None:
        """Unregister a region, or every region for ""; an unknown one is no error."""
        if name:
            self._mapped.pop(name, None)
        else:
            self._mapped.clear()

    def status(self, name: str | None = None) -> list[Region]:
        """Return the region called `name`, or all regions by name. Raises NOT_FOUND."""
        if not name:
            return [self._mapped[each].region for each in sorted(self._mapped)]
        if name not in self._mapped:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Unable to find system shared memory region: '{name}'")
        return [self._mapped[name].region]

    def read(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Return `byte_size` bytes of a region from its `offset` on, read-only and not copied: clients may change them.

        Raises NOT_FOUND, and INVALID for bytes outside the region.
        """
        return self.window(name, offset, byte_size).toreadonly()

    def window(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Return writable memory like `read`: checked when a request comes, filled when its response does."""
        mapped = self._mapped.get(name)
        if mapped is None:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        return mapped.window(offset, byte_size)

    def close(self) -> None:
        """Unregister every region; memory that nobody holds is unmapped."""
        self._mapped.clear()


def write_output(window: memoryview, tensor: Tensor) -> None:
    """Write an output into the shared memory that the request names for it. Raises INTERNAL where that is too small."""
    raw = memoryview(tensor.raw).cast("B")
    if len(raw) > len(window):
        message = (
            f"shared memory size specified with the request for output '{tensor.name}' ({len(window)} bytes) should be "
            f"at least {len(raw)} bytes to hold the results"
        )
        raise SluiceError(ErrorCode.INTERNAL, message)
    window[: len(raw)] = raw


class _MappedRegion:
    """A region in this process's memory. The mapping ends with the last view of it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        # A mapping begins at a page; the region need not.
        self._start = region.offset % mmap.ALLOCATIONGRANULARITY
        self._map = _map(region, region.offset - self._start)

    def window(self, offset: int, byte_size: int) -> memoryview:
        region = self.region
        if not 0 <= offset < region.byte_size:
            raise SluiceError(ErrorCode.INVALID, f"Invalid offset for shared memory region: '{region.name}'")
        # A client may have cut its object short, and touching what is gone would end the process.
        available = min(region.byte_size, self._map.size() - region.offset)
        # Triton computes the last byte's place, which an empty range at the beginning lacks.
        if not 0 <= byte_size <= available - offset or offset == byte_size == 0:
            message = f"Invalid offset + byte size for shared memory region: '{region.name}'"
            raise SluiceError(ErrorCode.INVALID, message)
        start = self._start + offset
        return memoryview(self._map)[start : start + byte_size]


def _map(region: Region, page_offset: int) -> mmap.mmap:
    descriptor = _open(region.key)
    try:
        size = _read_size(descriptor, region.key)
        if region.offset < 0 or region.byte_size < 0 or region.offset + region.byte_size > size:
            raise _not_registered(region, "invalid args")
        if region.byte_size == 0:
            raise _not_registered(region, "unable to process address spaceInvalid argument")
        return mmap.mmap(descriptor, region.offset - page_offset + region.byte_size, offset=page_offset)
    finally:
        os.close(descriptor)


def _open(key: str) -> int:
    """Open like shm_open: slashes before the name are left out, and none may be inside."""
    name = key.lstrip("/")
    if not name or "/" in name or name in (".", ".."):
        raise _not_opened(key)
    try:
        return os.open(os.path.join(_FOLDER, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):  # ValueError: a null character in the name
        raise _not_opened(key) from None


def _read_size(descriptor: int, key: str) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _not_opened(key)
    return status.st_size


def _not_opened(key: str) -> SluiceError:
    return SluiceError(ErrorCode.INTERNAL, f"Unable to open shared memory region: '{key}'")


def _not_registered(region: Region, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, f"failed to register shared memory region '{region.name}': {reason}")
