"""What a client may not send, and how the server answers it (RFC 9113)."""

from collections.abc import Callable
from struct import pack

import pytest
from h2.errors import ErrorCodes as Code

from tests.gateway.api.v2.grpc.http2.calls import DEAF, ECHO, HELD, STREAM, serving_calls
from tests.gateway.api.v2.grpc.http2.client import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Client,
    connected,
    frame,
    message,
    request_fields,
    reset,
    settings,
    window_update,
)

Send = Callable[[Client], bytes]
WINDOW = 1 << 20


def always(*frames: bytes) -> Send:
    return lambda client: b"".join(frames)


def opened(*frames: bytes) -> Send:
    """`frames` behind a request on stream 1 that goes on."""
    return lambda client: client.headers(1, STREAM) + b"".join(frames)


def held(*frames: bytes) -> Send:
    """`frames` behind a request on stream 1 that is complete and has no answer yet."""
    return lambda client: client.request(1, HELD) + b"".join(frames)


def fields(change: Callable[[list[tuple[str, str]]], list[tuple[str, str]]], end: int = END_STREAM) -> Send:
    """A request on stream 1 whose fields are changed."""
    return lambda client: frame(HEADERS, END_HEADERS | end, 1, client.block(change(request_fields())))


def without(name: str) -> Send:
    return fields(lambda given: [each for each in given if each[0] != name])


def with_field(name: str, value: str) -> Send:
    return fields(lambda given: [*given, (name, value)])


def self_dependent(client: Client) -> bytes:
    return frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, pack(">LB", 1, 0) + client.block(request_fields()))


def cut_block(client: Client) -> bytes:
    return frame(HEADERS, END_STREAM, 1, client.block(request_fields())[:10])


def interleaved(other: bytes) -> Send:
    return lambda client: cut_block(client) + other


def continued_elsewhere(client: Client) -> bytes:
    return client.request(1, HELD) + frame(HEADERS, 0, 3, b"") + frame(CONTINUATION, END_HEADERS, 1)


def older_stream(client: Client) -> bytes:
    return client.request(5, HELD) + client.request(3)


def older_even_stream(client: Client) -> bytes:
    return client.request(5, HELD) + client.request(2)


def mismatched(length: int, content: bytes) -> Send:
    return lambda client: (
        client.headers(1, STREAM, [("content-length", str(length))]) + frame(DATA, END_STREAM, 1, content)
    )


def trailers(flags: int, *more: tuple[str, str]) -> Send:
    return lambda client: client.headers(1, STREAM) + frame(HEADERS, flags, 1, client.block([("a", "b"), *more]))


def beyond_the_window(client: Client) -> bytes:
    content = message(bytes(WINDOW // 3)) * 4
    sent = [frame(DATA, 0, 1, content[at : at + 16_384]) for at in range(0, len(content), 16_384)]
    return client.headers(1, DEAF) + b"".join(sent)


CONNECTION_ERRORS: dict[str, tuple[Send, Code]] = {
    "DATA on stream 0": (always(frame(DATA, 0, 0, b"x")), Code.PROTOCOL_ERROR),
    "DATA on an idle stream": (always(frame(DATA, 0, 1, b"x")), Code.PROTOCOL_ERROR),
    "DATA on a stream of the server": (lambda c: c.request(5, HELD) + frame(DATA, 0, 2, b"x"), Code.PROTOCOL_ERROR),
    "DATA after a reset": (opened(reset(1), frame(DATA, 0, 1, b"x")), Code.STREAM_CLOSED),
    "too much padding": (opened(frame(DATA, PADDED, 1, b"\x06five!")), Code.PROTOCOL_ERROR),
    "padding without its length": (opened(frame(DATA, PADDED, 1)), Code.FRAME_SIZE_ERROR),
    "too much padding of HEADERS": (always(frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff")), Code.PROTOCOL_ERROR),
    "HEADERS on stream 0": (lambda c: c.headers(0), Code.PROTOCOL_ERROR),
    "HEADERS on an even stream": (lambda c: c.headers(2), Code.PROTOCOL_ERROR),
    "HEADERS on an old stream": (older_stream, Code.STREAM_CLOSED),
    "HEADERS on an old even stream": (older_even_stream, Code.PROTOCOL_ERROR),
    "HEADERS on a stream that was reset": (
        lambda c: c.headers(1, STREAM) + reset(1) + c.headers(1),
        Code.STREAM_CLOSED,
    ),
    "HEADERS on themselves": (self_dependent, Code.PROTOCOL_ERROR),
    "HEADERS too short for their priority": (
        always(frame(HEADERS, END_HEADERS | HAS_PRIORITY, 1, b"1234")),
        Code.FRAME_SIZE_ERROR,
    ),
    "PRIORITY on stream 0": (always(frame(PRIORITY, 0, 0, bytes(5))), Code.PROTOCOL_ERROR),
    "short PRIORITY on an idle stream": (always(frame(PRIORITY, 0, 1, bytes(4))), Code.FRAME_SIZE_ERROR),
    "RST_STREAM on stream 0": (always(reset(0)), Code.PROTOCOL_ERROR),
    "RST_STREAM on an idle stream": (always(reset(1)), Code.PROTOCOL_ERROR),
    "short RST_STREAM": (opened(frame(RST_STREAM, 0, 1, bytes(3))), Code.FRAME_SIZE_ERROR),
    "long RST_STREAM": (opened(frame(RST_STREAM, 0, 1, bytes(5))), Code.FRAME_SIZE_ERROR),
    "SETTINGS on a stream": (always(frame(SETTINGS, 0, 1)), Code.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (always(frame(SETTINGS, 0, 0, bytes(5))), Code.FRAME_SIZE_ERROR),
    "ACK with a payload": (always(frame(SETTINGS, ACK, 0, bytes(6))), Code.FRAME_SIZE_ERROR),
    "ENABLE_PUSH of 2": (always(settings((ENABLE_PUSH, 2))), Code.PROTOCOL_ERROR),
    "INITIAL_WINDOW_SIZE of 2^31": (always(settings((INITIAL_WINDOW_SIZE, 2**31))), Code.FLOW_CONTROL_ERROR),
    "MAX_FRAME_SIZE of 16383": (always(settings((MAX_FRAME_SIZE, 16_383))), Code.PROTOCOL_ERROR),
    "MAX_FRAME_SIZE of 2^24": (always(settings((MAX_FRAME_SIZE, 2**24))), Code.PROTOCOL_ERROR),
    "a bad setting before a good one": (always(settings((ENABLE_PUSH, 2), (ENABLE_PUSH, 0))), Code.PROTOCOL_ERROR),
    "INITIAL_WINDOW_SIZE over a grown window": (
        held(window_update(1, LARGEST_WINDOW - 65_535), settings((INITIAL_WINDOW_SIZE, 65_536))),
        Code.FLOW_CONTROL_ERROR,
    ),
    "PUSH_PROMISE": (opened(frame(PUSH_PROMISE, END_HEADERS, 1, pack(">L", 2))), Code.PROTOCOL_ERROR),
    "PING on a stream": (always(frame(PING, 0, 1, bytes(8))), Code.PROTOCOL_ERROR),
    "short PING": (always(frame(PING, 0, 0, bytes(7))), Code.FRAME_SIZE_ERROR),
    "GOAWAY on a stream": (always(frame(GOAWAY, 0, 1, bytes(8))), Code.PROTOCOL_ERROR),
    "short GOAWAY": (always(frame(GOAWAY, 0, 0, bytes(7))), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of 0": (always(window_update(0, 0)), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 0 and the reserved bit": (always(window_update(0, 1 << 31)), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE over the connection's largest": (always(window_update(0, LARGEST_WINDOW)), Code.FLOW_CONTROL_ERROR),
    "short WINDOW_UPDATE": (always(frame(WINDOW_UPDATE, 0, 0, bytes(3))), Code.FRAME_SIZE_ERROR),
    "long WINDOW_UPDATE on a stream": (opened(frame(WINDOW_UPDATE, 0, 1, bytes(5))), Code.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE on an idle stream": (always(window_update(1, 1)), Code.PROTOCOL_ERROR),
    "CONTINUATION alone": (always(frame(CONTINUATION, END_HEADERS, 1)), Code.PROTOCOL_ERROR),
    "CONTINUATION after the block": (opened(frame(CONTINUATION, END_HEADERS, 1)), Code.PROTOCOL_ERROR),
    "CONTINUATION of another stream": (continued_elsewhere, Code.PROTOCOL_ERROR),
    "PING amid a block": (interleaved(frame(PING, 0, 0, bytes(8))), Code.PROTOCOL_ERROR),
    "DATA amid a block": (interleaved(frame(DATA, 0, 1, b"x")), Code.PROTOCOL_ERROR),
    "an unknown frame amid a block": (interleaved(frame(0x42, 0, 1, b"x")), Code.PROTOCOL_ERROR),
    "a field of no table": (always(frame(HEADERS, END_HEADERS, 1, b"\xff\x80\x01")), Code.COMPRESSION_ERROR),
    "a field cut short": (always(frame(HEADERS, END_HEADERS, 1, b"\x00\x05ab")), Code.COMPRESSION_ERROR),
    "bad Huffman code": (always(frame(HEADERS, END_HEADERS, 1, b"\x00\x81\xff\x00")), Code.COMPRESSION_ERROR),
    "a table larger than allowed": (always(frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f")), Code.COMPRESSION_ERROR),
    "DATA over 16,384 bytes": (opened(frame(DATA, 0, 1, bytes(16_385))), Code.FRAME_SIZE_ERROR),
    "an unknown frame over 16,384 bytes": (always(frame(0x42, 0, 0, bytes(16_385))), Code.FRAME_SIZE_ERROR),
}
STREAM_ERRORS: dict[str, tuple[Send, Code]] = {
    "DATA after the end": (held(frame(DATA, 0, 1, b"x")), Code.STREAM_CLOSED),
    "HEADERS after the end": (lambda c: c.request(1, HELD) + c.headers(1), Code.STREAM_CLOSED),
    "DATA beyond the window": (beyond_the_window, Code.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE of 0": (opened(window_update(1, 0)), Code.PROTOCOL_ERROR),
    "WINDOW_UPDATE over the largest": (opened(window_update(1, LARGEST_WINDOW)), Code.FLOW_CONTROL_ERROR),
    "short PRIORITY": (opened(frame(PRIORITY, 0, 1, bytes(4))), Code.FRAME_SIZE_ERROR),
    "PRIORITY on itself": (opened(frame(PRIORITY, 0, 1, pack(">LB", 1, 0))), Code.PROTOCOL_ERROR),
    "HEADERS amid the data": (trailers(END_HEADERS), Code.PROTOCOL_ERROR),
    "trailers with a pseudo-field": (trailers(END_HEADERS | END_STREAM, (":path", "/")), Code.PROTOCOL_ERROR),
    "trailers in upper case": (trailers(END_HEADERS | END_STREAM, ("Name", "x")), Code.PROTOCOL_ERROR),
    "upper case": (with_field("Name", "value"), Code.PROTOCOL_ERROR),
    "no name": (with_field("", "value"), Code.PROTOCOL_ERROR),
    "a space in a name": (with_field("a b", "value"), Code.PROTOCOL_ERROR),
    "a colon in a name": (with_field("a:b", "value"), Code.PROTOCOL_ERROR),
    "a line's end in a value": (with_field("name", "a\r\nb: c"), Code.PROTOCOL_ERROR),
    "NUL in a value": (with_field("name", "a\0"), Code.PROTOCOL_ERROR),
    "a pseudo-field after others": (with_field(":path", "/"), Code.PROTOCOL_ERROR),
    "a pseudo-field twice": (fields(lambda given: [(":path", "/"), *given]), Code.PROTOCOL_ERROR),
    "an unknown pseudo-field": (fields(lambda given: [(":colour", "red"), *given]), Code.PROTOCOL_ERROR),
    "a response's pseudo-field": (fields(lambda given: [(":status", "200"), *given]), Code.PROTOCOL_ERROR),
    "no :method": (without(":method"), Code.PROTOCOL_ERROR),
    "no :scheme": (without(":scheme"), Code.PROTOCOL_ERROR),
    "no :path": (without(":path"), Code.PROTOCOL_ERROR),
    "an empty :path": (fields(lambda given: [(n, "" if n == ":path" else v) for n, v in given]), Code.PROTOCOL_ERROR),
    "no fields": (fields(lambda given: []), Code.PROTOCOL_ERROR),
    "connection": (with_field("connection", "close"), Code.PROTOCOL_ERROR),
    "keep-alive": (with_field("keep-alive", "1"), Code.PROTOCOL_ERROR),
    "proxy-connection": (with_field("proxy-connection", "close"), Code.PROTOCOL_ERROR),
    "transfer-encoding": (with_field("transfer-encoding", "chunked"), Code.PROTOCOL_ERROR),
    "upgrade": (with_field("upgrade", "h2c"), Code.PROTOCOL_ERROR),
    "te: gzip": (with_field("te", "gzip"), Code.PROTOCOL_ERROR),
    "a content-length that is none": (with_field("content-length", "x"), Code.PROTOCOL_ERROR),
    "content-length twice": (
        fields(lambda given: [*given, ("content-length", "5"), ("content-length", "0")]),
        Code.PROTOCOL_ERROR,
    ),
    "a content-length of thousands of digits": (with_field("content-length", "9" * 5000), Code.PROTOCOL_ERROR),
    "less than content-length": (mismatched(7, message(b"")), Code.PROTOCOL_ERROR),
    "more than content-length": (mismatched(3, message(b"")), Code.PROTOCOL_ERROR),
    "no data for content-length": (with_field("content-length", "5"), Code.PROTOCOL_ERROR),
}
IGNORED: dict[str, Send] = {
    "an unknown frame": always(frame(0x42, 0xFF, 0, b"anything")),
    "an unknown frame on an idle stream": always(frame(0x42, 0, 7)),
    "an unknown setting": always(settings((0x42, 7))),
    "the reserved bit of a stream": always(frame(PING, ACK, 0x8000_0000, bytes(8))),
    "a ping's answer that nobody asked for": always(frame(PING, ACK, 0, b"whatever")),
    "PRIORITY on an idle stream": always(frame(PRIORITY, 0, 9, pack(">LB", 3, 16))),
    "GOAWAY": always(frame(GOAWAY, 0, 0, pack(">LL", 0, 0) + b"bye")),
    "WINDOW_UPDATE on a closed stream": opened(reset(1), window_update(1, 1)),
    "RST_STREAM on a closed stream": opened(reset(1), reset(1)),
    "PRIORITY on a closed stream": opened(reset(1), frame(PRIORITY, 0, 1, bytes(5))),
    "DATA after a refusal": lambda c: c.headers(1, more=[("Name", "x")]) + frame(DATA, END_STREAM, 1, b"on its way"),
    "trailers after a refusal": lambda c: (
        c.headers(1, more=[("Name", "x")]) + frame(HEADERS, END_HEADERS | END_STREAM, 1, c.block([("trailer", "x")]))
    ),
    "a setting with the largest values": always(
        settings((MAX_FRAME_SIZE, 2**24 - 1), (INITIAL_WINDOW_SIZE, 2**31 - 1))
    ),
    "windows that are the largest": held(window_update(0, LARGEST_WINDOW - 65_535), window_update(1, 1)),
    "padding": lambda c: c.headers(1) + frame(DATA, PADDED | END_STREAM, 1, b"\x03" + message(b"") + bytes(3)),
    "nothing but padding": lambda c: c.headers(1) + frame(DATA, PADDED, 1, b"\x03" + bytes(3)) + frame(DATA, 1, 1),
    "trailers": trailers(END_HEADERS | END_STREAM),
    "a priority in HEADERS": lambda c: frame(
        HEADERS, END_HEADERS | END_STREAM | HAS_PRIORITY, 1, pack(">LB", 0, 16) + c.block(request_fields())
    ),
    "a padded priority in HEADERS": lambda c: frame(
        HEADERS,
        END_HEADERS | END_STREAM | HAS_PRIORITY | PADDED,
        1,
        b"\x02" + pack(">LB", 0, 16) + c.block(request_fields()) + bytes(2),
    ),
    "a block in three pieces": lambda c: (
        frame(HEADERS, END_STREAM, 1)
        + frame(CONTINUATION, 0, 1)
        + frame(CONTINUATION, END_HEADERS, 1, c.block(request_fields()))
    ),
}


@pytest.mark.parametrize(("send", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS)
async def test_what_ends_the_connection(send: Send, code: Code) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(send(client))
        await client.until_closed()
        [(_, found, text)] = client.goaways
        assert (Code(found), bool(text)) == (code, True)
        await calls.until_idle()
        async with connected(calls.port) as other:
            assert (await other.ask(1)).messages == [b"hello"]


@pytest.mark.parametrize(("send", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
async def test_what_ends_the_stream(send: Send, code: Code) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(send(client))
        ended = await client.end_of(1)
        assert ended.reset is not None and (Code(ended.reset), ended.is_ended) == (code, False)
        assert (await client.ask(11)).messages == [b"hello"]
        assert not client.goaways
        await calls.until_idle()


@pytest.mark.parametrize("send", IGNORED.values(), ids=IGNORED)
async def test_what_is_no_error(send: Send) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(send(client))
        assert (await client.ask(11)).messages == [b"hello"]
        assert not client.goaways


@pytest.mark.parametrize(
    "first",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, ACK, 0),
        frame(WINDOW_UPDATE, 0, 0, pack(">L", 1)),
        frame(0x42, 0, 0),
        b"\xff" * 9,
    ],
    ids=["PING", "ACK", "WINDOW_UPDATE", "unknown", "garbage"],
)
async def test_the_first_frame_must_be_settings(first: bytes) -> None:
    async with serving_calls() as calls, connected(calls.port, sends_preface=False) as client:
        client.send(PREFACE, first)
        await client.until_closed()
        assert [Code(code) for _, code, _ in client.goaways] == [Code.PROTOCOL_ERROR]


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_frames_that_come_in_pieces(size: int) -> None:
    async with serving_calls() as calls, connected(calls.port, sends_preface=False) as client:
        sent = PREFACE + settings() + client.request(1, ECHO, b"in pieces")
        for at in range(0, len(sent), size):
            client.send(sent[at : at + size])
            await client.drain()
        assert (await client.end_of(1)).messages == [b"in pieces"]


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"PUT /v2 HTTP/1.0\r\n\r\n"])
async def test_http1_gets_a_sentence(first: bytes) -> None:
    async with serving_calls() as calls, connected(calls.port, sends_preface=False) as client:
        client.send(first)
        await client.until_closed()
        answer = bytes(client.raw)
        assert answer.startswith(b"HTTP/1.1 505 ") and b"This port speaks gRPC over HTTP/2" in answer


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nXX", b"hello\r\n"])
async def test_garbage_gets_nothing(garbage: bytes) -> None:
    async with serving_calls() as calls, connected(calls.port, sends_preface=False) as client:
        client.send(garbage)
        await client.until_closed()
        assert client.raw == b""
        async with connected(calls.port) as other:
            assert (await other.ask(1)).messages == [b"hello"]
