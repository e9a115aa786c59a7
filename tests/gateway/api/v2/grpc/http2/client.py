"""A client of HTTP/2 that does what it is told, right or wrong. It reads with `hyperframe` and `hpack`."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from struct import Struct, pack
from types import TracebackType

from h2.errors import ErrorCodes
from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.gateway.api.v2.grpc.http2.calls import ECHO
from tests.waiting import PATIENCE_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
HEAD_BYTES = 9
LARGEST_WINDOW = 2**31 - 1
_HEAD = Struct(">HBBBL")
Fields = Iterable[tuple[str, str]]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings(*values: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(pack(">HL", key, value) for key, value in values))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, pack(">L", increment))


def reset(stream_id: int, code: int = ErrorCodes.CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream_id, pack(">L", code))


def message(content: bytes, flag: int = 0) -> bytes:
    """A message of gRPC with its prefix."""
    return pack(">BL", flag, len(content)) + content


def request_fields(path: str = ECHO, more: Fields = ()) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


class Received:
    """What has come on one stream."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, str]] = []
        self.data = bytearray()
        self.frame_sizes: list[int] = []
        self.is_ended = False
        self.reset: int | None = None

    @property
    def is_done(self) -> bool:
        return self.is_ended or self.reset is not None

    @property
    def status(self) -> int:
        """The status of gRPC."""
        return int(self.blocks[-1]["grpc-status"])

    @property
    def messages(self) -> list[bytes]:
        found, rest = [], bytes(self.data)
        while rest:
            size = int.from_bytes(rest[1:5])
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found


class Client:
    """One connection. It sends no frame by itself but those that `gives_windows` asks for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.encoder = Encoder()
        self.decoder = Decoder(1 << 20)
        self.streams: dict[int, Received] = {}
        self.settings: dict[int, int] = {}
        self.windows: dict[int, int] = {}
        """What the server has let this side send, by stream, beyond the initial windows."""
        self.goaways: list[tuple[int, int, str]] = []
        """Last stream, code and text of each GOAWAY."""
        self.pings: list[bytes] = []
        self.pongs: list[bytes] = []
        self.order: list[int] = []
        """The stream of each frame of data, in order."""
        self.raw = bytearray()
        """What has come and is no whole frame."""
        self.num_acks = 0
        self.is_closed = False
        self.gives_windows = False
        self.answers_pings = True
        self._kept: list[tuple[int, int, bytes]] | None = None
        self._reader = reader
        self._writer = writer
        self._changed = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Begin to read."""
        self._receiving = asyncio.get_running_loop().create_task(self._receive())

    async def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving])
        self._writer.close()
        self._writer.transport.abort()

    # --- what is sent ---

    def send(self, *parts: bytes) -> None:
        """Send, unless the server has closed."""
        if not self._writer.is_closing():
            self._writer.write(b"".join(parts))

    async def drain(self) -> None:
        await self._writer.drain()

    @property
    def num_unsent(self) -> int:
        """Bytes that the sockets have not taken."""
        return self._writer.transport.get_write_buffer_size()

    def block(self, fields: Fields) -> bytes:
        return self.encoder.encode(list(fields))

    def headers(self, stream_id: int, path: str = ECHO, more: Fields = (), flags: int = END_HEADERS) -> bytes:
        return frame(HEADERS, flags, stream_id, self.block(request_fields(path, more)))

    def request(self, stream_id: int, path: str = ECHO, content: bytes = b"", more: Fields = ()) -> bytes:
        """A whole request of one message."""
        return self.headers(stream_id, path, more) + frame(DATA, END_STREAM, stream_id, message(content))

    # --- what comes ---

    def stream(self, stream_id: int) -> Received:
        return self.streams.setdefault(stream_id, Received())

    def room(self, stream_id: int) -> int:
        """Bytes of data that the server has let this side send on a stream, if no other has sent any."""
        initial = self.settings.get(INITIAL_WINDOW_SIZE, 65_535)
        return min(initial + self.windows.get(stream_id, 0), 65_535 + self.windows.get(0, 0))

    async def until(self, claim: Callable[[], bool]) -> None:
        """Wait until `claim` holds; it is checked when anything comes."""
        async with asyncio.timeout(PATIENCE_S):
            while not claim():
                assert not self.is_closed, f"the server has closed: {self.goaways}"
                self._changed.clear()
                await self._changed.wait()

    async def end_of(self, stream_id: int) -> Received:
        """Wait for the end of a stream, or its reset."""
        received = self.stream(stream_id)
        await self.until(lambda: received.is_done)
        return received

    async def until_closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_closed:
                self._changed.clear()
                await self._changed.wait()

    async def ask(self, stream_id: int, path: str = ECHO, content: bytes = b"hello") -> Received:
        self.send(self.request(stream_id, path, content))
        return await self.end_of(stream_id)

    async def _receive(self) -> None:
        try:
            while data := await self._reader.read(1 << 16):
                self.raw += data
                self._take_frames()
                self._changed.set()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            self.is_closed = True
            self._changed.set()

    def keep_frames(self) -> list[tuple[int, int, bytes]]:
        """Keep what comes from now on as it is: a list of types, flags and contents that grows."""
        self._kept = []
        return self._kept

    def _take_frames(self) -> None:
        at = 0
        while len(self.raw) - at >= HEAD_BYTES:
            parsed, size = Frame.parse_frame_header(memoryview(bytes(self.raw[at : at + HEAD_BYTES])))
            end = at + HEAD_BYTES + size
            if end > len(self.raw):
                break
            body = bytes(self.raw[at + HEAD_BYTES : end])
            if self._kept is not None:
                self._kept.append((self.raw[at + 3], self.raw[at + 4], body))
            else:
                parsed.parse_body(memoryview(body))
                self._take(parsed)
            at = end
        del self.raw[:at]

    def _take(self, each: Frame) -> None:
        received = self.stream(each.stream_id)
        if isinstance(each, DataFrame):
            received.data += each.data
            received.frame_sizes.append(len(each.data))
            self.order.append(each.stream_id)
            if self.gives_windows and each.data:
                size = each.flow_controlled_length
                self.send(window_update(0, size), window_update(each.stream_id, size))
        elif isinstance(each, HeadersFrame):
            received.blocks.append({str(name): str(value) for name, value in self.decoder.decode(each.data)})
        elif isinstance(each, RstStreamFrame):
            received.reset = each.error_code
        elif isinstance(each, GoAwayFrame):
            self.goaways.append((each.last_stream_id, each.error_code, each.additional_data.decode()))
        elif isinstance(each, SettingsFrame):
            self.settings |= each.settings
            self.num_acks += "ACK" in each.flags
        elif isinstance(each, WindowUpdateFrame):
            self.windows[each.stream_id] = self.windows.get(each.stream_id, 0) + each.window_increment
        elif isinstance(each, PingFrame):
            self._take_ping(each)
        received.is_ended = received.is_ended or "END_STREAM" in each.flags

    def _take_ping(self, each: PingFrame) -> None:
        if "ACK" in each.flags:
            self.pongs.append(each.opaque_data)
            return
        self.pings.append(each.opaque_data)
        if self.answers_pings:
            self.send(frame(PING, ACK, 0, each.opaque_data))

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@asynccontextmanager
async def connected(
    port: int,
    own_settings: Mapping[int, int] | None = None,
    *,
    sends_preface: bool = True,
    reads: bool = True,
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `port`, which has sent its preface and settings."""
    ends = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if not reads:
        ends.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # else the kernel keeps several megabytes
    ends.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(ends, (host, port))
        name = None if tls is None else "localhost"
        reader, writer = await asyncio.open_connection(sock=ends, ssl=tls, server_hostname=name)
    except BaseException:
        ends.close()
        raise
    async with Client(reader, writer) as client:
        if sends_preface:
            client.send(PREFACE, settings(*(own_settings or {}).items()))
        if reads:
            client.read()
        yield client


async def answer(client: Client, fields: list[tuple[str, str]], *data: bytes) -> Received:
    """Send a request of these fields and data on the next stream, and return what comes."""
    number = 2 * len(client.streams) + 1
    client.send(
        frame(HEADERS, END_HEADERS, number, client.block(fields)),
        *(frame(DATA, 0, number, each) for each in data),
        frame(DATA, END_STREAM, number),
    )
    return await client.end_of(number)
