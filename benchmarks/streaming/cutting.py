"""A client whose connections are cut at random bytes, and which comes back to its stream until that has ended."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import orjson

from benchmarks.figures import BenchmarkError

_READ_BYTES = 65536
_RETRY_S = 0.1
_HEAD_END = b"\r\n\r\n"


class CutError(Exception):
    """The connection ended before the stream did: it was cut, refused or broken."""


@dataclass(slots=True)
class Cuts:
    """The cuts of a client's connections: each of the first `most` after up to `most_bytes` bytes."""

    random: random.Random
    most: int
    most_bytes: int

    def next(self) -> int | None:
        """Return how many bytes the next connection brings; None for all."""
        self.most -= 1
        return self.random.randint(0, self.most_bytes) if self.most >= 0 else None


@dataclass(slots=True)
class CutStream:
    """A stream, read over as many connections as it takes. An event that is missing or comes twice is an error.

    `addresses` are those of the gateways; each connection goes to the next one.
    """

    addresses: Sequence[tuple[str, int]]
    path: str
    body: Mapping[str, object]
    cuts: Cuts
    key: str = ""
    """The idempotency key, with which a stream is found whose id was cut off; "" for none."""
    events: list[bytes] = field(default_factory=list)
    """The events without their ids."""
    stream_id: str = ""
    last_id: bytes = b""
    """The id of the last event, as it came."""
    num_connections: int = 0
    longest_pause_s: float = 0.0
    """Between two events, whichever connections they came by."""
    _came_at: float = 0.0

    async def read(self, patience_s: float = 60.0) -> list[bytes]:
        """Return every event. Raises BenchmarkError for lost or repeated ones, and TimeoutError."""
        async with asyncio.timeout(patience_s):
            while True:
                address = self.addresses[self.num_connections % len(self.addresses)]
                self.num_connections += 1
                try:
                    await self._connect(address)
                except (CutError, OSError):
                    await asyncio.sleep(_RETRY_S if self.cuts.most < 0 else 0)
                else:
                    return self.events

    async def _connect(self, address: tuple[str, int]) -> None:
        """Read the rest of the stream, or until the connection is cut. Raises CutError and OSError."""
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(self._request())
            wire = _Wire(reader, self.cuts.next())
            status, headers = await wire.head()
            if status in (404, 503) and self.stream_id:
                raise CutError  # perhaps its gateway is about to be replaced
            if status != 200:
                raise BenchmarkError(f"status {status}: {(await wire.rest())[:500]!r}")
            self.stream_id = headers["x-sluice-stream"]
            await self._take_events(wire)
        finally:
            writer.close()

    def _request(self) -> bytes:
        content = orjson.dumps(self.body)
        lines = [f"POST {self.path} HTTP/1.1", "host: test", f"content-length: {len(content)}", "x-sluice-resume: true"]
        if self.key:
            lines.append(f"idempotency-key: {self.key}")
        if self.stream_id:
            lines.append(f"last-event-id: {self.last_id.decode() or f'{self.stream_id}:0'}")
        return "\r\n".join(lines).encode() + _HEAD_END + content

    async def _take_events(self, wire: "_Wire") -> None:
        """Take complete events alone, as the specification of server-sent events says."""
        unread = b""
        while (piece := await wire.chunk()) is not None:
            *whole, unread = (unread + piece).split(b"\n\n")
            for event in whole:
                if not event.startswith(b":"):
                    self._take(event)

    def _take(self, event: bytes) -> None:
        name, _, rest = event.partition(b"\n")
        stream, _, number = name.removeprefix(b"id: ").rpartition(b":")
        expected = f"{self.stream_id}:{len(self.events) + 1}".encode()
        if stream.partition(b".")[0] + b":" + number != expected:  # behind a dot: how often it was taken over
            raise BenchmarkError(f"got event {name!r} where {expected!r} comes next")
        self.last_id = name.removeprefix(b"id: ")
        self.events.append(rest)
        now = perf_counter()
        if self._came_at:
            self.longest_pause_s = max(self.longest_pause_s, now - self._came_at)
        self._came_at = now


class _Wire:
    """Reads one response of HTTP/1.1, of which at most `most_bytes` bytes come."""

    def __init__(self, reader: asyncio.StreamReader, most_bytes: int | None) -> None:
        self._reader = reader
        self._left = most_bytes
        self._unread = b""

    async def head(self) -> tuple[int, dict[str, str]]:
        while _HEAD_END not in self._unread:
            await self._read()
        head, _, self._unread = self._unread.partition(_HEAD_END)
        first, *lines = head.decode("latin-1").split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines)

    async def chunk(self) -> bytes | None:
        """Return the next chunk of the body, None after the last one."""
        while b"\r\n" not in self._unread:
            await self._read()
        size, _, rest = self._unread.partition(b"\r\n")
        num_bytes = int(size, 16)
        while len(rest) < num_bytes + 2:
            await self._read()
            rest = self._unread[len(size) + 2 :]
        self._unread = rest[num_bytes + 2 :]
        return rest[:num_bytes] if num_bytes else None

    async def rest(self) -> bytes:
        """Return what comes until the connection pauses."""
        return self._unread or await self._reader.read(_READ_BYTES)

    async def _read(self) -> None:
        if self._left == 0:
            raise CutError
        piece = await self._reader.read(_READ_BYTES if self._left is None else min(self._left, _READ_BYTES))
        if not piece:
            raise CutError
        if self._left is not None:
            self._left -= len(piece)
        self._unread += piece
