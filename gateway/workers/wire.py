"""A connection between two processes of one server: messages of msgspec, each behind its length."""

import asyncio
import logging
from collections import deque
from typing import Generic, TypeVar, cast

import msgspec

T = TypeVar("T")
log = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_MOST_UNREAD = 16
"""Messages that wait for their reader before the other end must wait, too."""


class Wire(asyncio.Protocol, Generic[T]):
    """Reads messages of type T, one task at a time, and writes any. Belongs to the event loop."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[T]") -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._unread: deque[T] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_paused = False
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    async def read(self) -> T | None:
        """Return the next message; None where the other end has closed and nothing is left."""
        while not self._unread:
            if self._closed.done():
                return None
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        message = self._unread.popleft()
        if self._is_paused and not self._unread:
            self._is_paused = False
            self._connected.resume_reading()
        return message

    def send(self, message: object) -> None:
        """Write a message without waiting; nothing where the connection is closed."""
        if self._transport is not None and not self._closed.done():
            payload = self._encoder.encode(message)
            self._transport.write(len(payload).to_bytes(_LENGTH_BYTES) + payload)

    async def write(self, message: object) -> None:
        """Write a message, and wait while the other end reads too slowly."""
        self.send(message)
        await self.drain()

    @property
    def is_full(self) -> bool:
        """Whether the other end reads too slowly, so that `drain` would wait."""
        return self._room is not None

    async def drain(self) -> None:
        """Wait while the other end reads too slowly."""
        if self._room is not None:
            await asyncio.shield(self._room)

    async def wait_closed(self) -> None:
        """Wait until either end has closed."""
        await asyncio.shield(self._closed)

    def close(self) -> None:
        """Close, once all is written."""
        if self._transport is not None:
            self._transport.close()

    @property
    def _connected(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer, start = self._buffer, 0
        buffer += data
        while len(buffer) >= start + _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(buffer[start:begin])
            if len(buffer) < end:
                break
            try:
                self._unread.append(self._decoder.decode(bytes(buffer[begin:end])))
            except msgspec.MsgspecError:
                log.exception("a message of another process of this server cannot be read; its connection is closed")
                self._connected.abort()
                return
            start = end
        if start:
            del buffer[:start]
            self._wake()
        if len(self._unread) > _MOST_UNREAD and not self._is_paused:
            self._is_paused = True
            self._connected.pause_reading()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self.resume_writing()
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
