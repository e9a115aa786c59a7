"""POSIX shared memory that clients register: tensors lie there, and requests only name their places."""

import asyncio
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.tensors.tensor import Tensor

_FOLDER = "/dev/shm"
"""Folder of the objects that `shm_open` opens on Linux."""
_RESERVED_PREFIX = "triton_python_backend_shm_region_"
"""Beginning of the names of objects that Triton's Python backend creates for itself."""
LONG_COPY_BYTES = 1 << 20
"""Size from which a copy takes milliseconds: 10 GB/s, and a page fault for each 4 KB that are new."""
_MAX_SIZE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Region:
    """A registered part of the shared memory object `key`: `byte_size` bytes from `offset` on, under a name."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemoryRegistry:
    """Registered regions, by name. Event loop's thread only.

    A region that is unregistered while requests have views of it, from `read` and `window`, stays until the last view
    is gone; new requests may use it until then.
    """

    def __init__(self, is_allowed: bool = False) -> None:
        """`is_allowed`: clients may register regions. Without it they may only ask for their status."""
        self._is_allowed = is_allowed
        self._mapped: dict[str, _MappedRegion] = {}
        self._to_unregister: set[str] = set()

    def require_allowed(self) -> None:
        """Raise UNIMPLEMENTED where clients may not use shared memory, of the system or of a GPU."""
        if not self._is_allowed:
            message = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a region.

        Raises UNIMPLEMENTED as `require_allowed`, ALREADY_EXISTS for a known name, INTERNAL where `key` cannot be
        opened, INVALID for a reserved key and for a region that exceeds its object.
        """
        self.require_allowed()
        _check_key(name, key)
        self._drop_unused()
        if name in self._mapped:
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        self._mapped[name] = _MappedRegion(Region(name, key, offset, byte_size))

    def unregister(self, name: str) -> None:
        """Unregister a region, or every region for "", as soon as no request uses it; an unknown one is no error.

        Raises UNIMPLEMENTED as `require_allowed`.
        """
        self.require_allowed()
        self._to_unregister |= self._mapped.keys() & {name} if name else self._mapped.keys()
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Drop the regions that are to be unregistered and that nobody has a view of."""
        for name in [each for each in self._to_unregister if self._mapped[each].close_unused()]:
            del self._mapped[name]
            self._to_unregister.remove(name)

    def status(self, name: str | None = None) -> list[Region]:
        """Return the region called `name`, or all regions by name. Raises NOT_FOUND."""
        self._drop_unused()
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
        self._drop_unused()
        mapped = self._mapped.get(name)
        if mapped is None:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        return mapped.window(offset, byte_size)

    def close(self) -> None:
        """Unregister every region; memory that nobody holds is unmapped."""
        self._mapped.clear()
        self._to_unregister.clear()


def write_output(window: memoryview, tensor: Tensor) -> None:
    """Write an output into the shared memory that the request names for it. Raises INTERNAL where that is too small."""
    raw = memoryview(tensor.raw).cast("B")
    if len(raw) > len(window):
        message = (
            f"shared memory size specified with the request for output '{tensor.name}' ({len(window)} bytes) should be "
            f"at least {len(raw)} bytes to hold the results"
        )
        raise SluiceError(ErrorCode.INTERNAL, message)
    if len(raw) < LONG_COPY_BYTES:
        window[: len(raw)] = raw
    else:  # numpy leaves the interpreter's lock to others meanwhile
        np.frombuffer(window, np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)


class LongCopyError(SluiceError):
    """A copy would take long, and was asked for on the event loop's thread: read the request on another one."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.INTERNAL, "a long copy of shared memory is due on another thread")


def copy_window(window: memoryview) -> bytes | memoryview:
    """Return a copy of shared memory. Raises LongCopyError for a long one on the thread of an event loop."""
    if len(window) < LONG_COPY_BYTES:
        return bytes(window)
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise LongCopyError
    return np.frombuffer(window, np.uint8).copy().data.toreadonly()


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
        if offset + byte_size > _MAX_SIZE:
            message = (
                f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value "
                f"({_MAX_SIZE}) for region '{region.name}'"
            )
            raise SluiceError(ErrorCode.INVALID, message)
        # A client may have cut its object short, and touching what is gone would end the process.
        available = min(region.byte_size, self._map.size() - region.offset)
        if not 0 <= byte_size <= available - offset:
            message = f"Invalid offset + byte size for shared memory region: '{region.name}'"
            raise SluiceError(ErrorCode.INVALID, message)
        start = self._start + offset
        return memoryview(self._map)[start : start + byte_size]

    def close_unused(self) -> bool:
        """Unmap the region unless somebody has a view of it. Return whether it is unmapped."""
        try:
            self._map.close()
        except BufferError:  # views export the mapping
            return False
        return True


def _check_key(name: str, key: str) -> None:
    """Raise INVALID for a key that names no object, or one that no client may have."""
    bare = key.lstrip("/")
    if not bare:
        message = f"cannot register shared memory region '{name}' - invalid shm key '{key}'"
        raise SluiceError(ErrorCode.INVALID, message)
    if bare.startswith(_RESERVED_PREFIX):
        message = (
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix "
            f"'{_RESERVED_PREFIX}'"
        )
        raise SluiceError(ErrorCode.INVALID, message)


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
