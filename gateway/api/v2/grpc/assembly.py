"""Messages of a call, put together from the pieces that they come in."""

from struct import Struct

import numpy as np

PREFIX = Struct(">BL")
"""What stands before each message: whether it is compressed, and its bytes."""
_COPIED_BYTES = 64 << 10
_NO_BYTES = memoryview(b"")
Message = tuple[int, bytes | memoryview]
"""The flag of the prefix, and the message."""


class MessageTooLong(Exception):
    """A message is announced with `size` bytes, more than are taken."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Assembly:
    """The messages of one call. A long one is filled as its pieces come, so that no single copy takes long."""

    __slots__ = ("_buffer", "_flag", "_max_bytes", "_num_filled", "_prefix")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefix = b""
        """Of a message whose prefix is not whole, else empty."""
        self._buffer: memoryview | None = None
        """Of a message that is not whole."""
        self._num_filled = 0
        self._flag = 0

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun and is not whole."""
        return self._buffer is not None or bool(self._prefix)

    @property
    def num_missing(self) -> int:
        """Bytes that the begun message lacks; 0 where none has begun."""
        return 0 if self._buffer is None else len(self._buffer) - self._num_filled

    def add(self, payload: bytes | memoryview) -> list[Message]:
        """Add what came next, and return the messages that are whole now. Raises MessageTooLong."""
        whole: list[Message] = []
        at = 0
        while at < len(payload):
            if self._buffer is not None:
                at = self._fill(payload, at)
            elif not self._prefix and len(payload) - at >= PREFIX.size:
                flag, size = PREFIX.unpack_from(payload, at)
                at += PREFIX.size
                if size <= len(payload) - at:
                    self._check(size)
                    whole.append((flag, bytes(payload[at : at + size])))
                    at += size
                    continue
                self._begin(flag, size)
            else:
                at = self._add_prefix(payload, at)
            if self._buffer is not None and self._num_filled == len(self._buffer):
                whole.append((self._flag, self._take()))
        return whole

    def _fill(self, payload: bytes | memoryview, at: int) -> int:
        assert self._buffer is not None
        end = min(at + self.num_missing, len(payload))
        filled = self._num_filled + end - at
        self._buffer[self._num_filled : filled] = payload[at:end]
        self._num_filled = filled
        return end

    def _add_prefix(self, payload: bytes | memoryview, at: int) -> int:
        end = at + PREFIX.size - len(self._prefix)
        self._prefix += bytes(payload[at:end])
        if len(self._prefix) == PREFIX.size:
            flag, size = PREFIX.unpack(self._prefix)
            self._prefix = b""
            self._begin(flag, size)
        return min(end, len(payload))

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise MessageTooLong(size)

    def _begin(self, flag: int, size: int) -> None:
        self._check(size)
        # numpy's memory is not touched before it is written: a client may announce what it never sends.
        self._buffer = np.empty(size, np.uint8).data if size else _NO_BYTES
        self._num_filled, self._flag = 0, flag

    def _take(self) -> bytes | memoryview:
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        return bytes(buffer) if len(buffer) <= _COPIED_BYTES else buffer.toreadonly()
