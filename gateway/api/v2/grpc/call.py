"""One call of gRPC on a stream of HTTP/2: messages in, a handler's task, messages and a status out.

Handlers are those of the `grpc` package, so that another server can serve the same ones, and get the part of
`grpc.aio.ServicerContext` that they use.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from inspect import isasyncgen
from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from sluice.errors import SluiceError
from sluice.gateway.api.v2.grpc import wire
from sluice.gateway.api.v2.grpc.messages import WireMessage, join_message, message_size
from sluice.gateway.api.v2.grpc.methods import BeginDirect, CallDetails, Methods, Status, as_sluice_error, status_of
from sluice.gateway.api.v2.grpc.wire import ENCODINGS, PREFIX, Assembly, MessageTooLong, pack, unpack
from sluice.gateway.front.http2.frames import H2ErrorCode as Http2Error
from sluice.gateway.front.http2.frames import StreamFault, write_fields
from sluice.gateway.front.http2.limits import WINDOW_BYTES
from sluice.gateway.front.http2.sending import Http2FrameWriter, Stream
from sluice.pipelines.text.stream import give
from sluice.record.spans import RemoteParent, parse_traceparent, remote_parent

log = logging.getLogger(__name__)
_OK = grpc.StatusCode.OK
_FIRST_MESSAGE_S = 0.05
_SMALL_MESSAGE = 16 << 10
"""Longest message that is copied next to its prefix, rather than sent behind it."""


@dataclass(slots=True, eq=False)
class CallHost:
    """The state that the calls of one server share: its methods, its limits and the running handlers."""

    methods: Methods
    max_message_bytes: int
    compression_level: int
    """zlib's level for responses; 0 is none."""
    on_end: Callable[[], None]
    """Called when a handler has ended."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Handlers that have not ended."""


class Aborted(Exception):
    """A handler has ended its call with a status of its own."""


class GrpcCall(Stream):
    """A call, and its handler's context. Lives on the event loop's thread."""

    __slots__ = (
        "_arrived",
        "_assembly",
        "_code",
        "_deadline",
        "_direct",
        "_head",
        "_host",
        "_messages",
        "_num_bytes",
        "_status",
        "_task",
        "_unpacked",
        "has_begun",
        "on_gone",
    )

    def __init__(self, connection: Http2FrameWriter, stream_id: int, head: wire.CallHead, host: CallHost) -> None:
        super().__init__(connection, stream_id)
        self._head = head
        self._host = host
        self._messages: deque[tuple[bool, bytes | memoryview]] = deque()
        """Messages that nobody has read, and whether they are compressed."""
        self._assembly: Assembly | None = None
        """Puts messages together, for a client that does not send each in a frame of its own."""
        self._num_bytes = 0
        self._arrived: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._direct: BeginDirect | None = None
        """What answers the only message without a task."""
        self.on_gone: Callable[[], None] | None = None
        """Cancels what a direct method has begun."""
        self._deadline: asyncio.TimerHandle | None = None
        self._unpacked: WireMessage | None = None
        """A message that is to be compressed."""
        self.has_begun = False
        """Whether the response's fields are sent."""
        self._code: grpc.StatusCode | None = None
        self._status: Status | None = None
        """How its handler has ended it."""

    def begin(self) -> None:
        """Start the handler, now or with the only message, or refuse the call."""
        head = self._head
        if head.refusal:
            self.connection.send_headers(self.id, head.refusal, is_last=True)
            self._end()
            return
        if head.encoding not in ENCODINGS:
            text = f"grpc-encoding {head.encoding!r} is not known here, use one of {', '.join(ENCODINGS)}"
            accepted = (("grpc-accept-encoding", wire.ENCODINGS_TEXT),)
            self.finish(grpc.StatusCode.UNIMPLEMENTED, text, accepted)
            return
        if head.timeout_s is not None:
            self._deadline = self.connection.loop.call_later(head.timeout_s, self._expire)
        self._direct = self._host.methods.find_direct(head.path)
        if self._direct is None:
            self._start_task()

    def _start_task(self) -> None:
        self._direct = None
        self.connection.num_running += 1
        self._run_task(self._run())

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self.connection.loop.create_task(work)
        self._host.tasks.add(self._task)
        self._task.add_done_callback(self._forget_task)

    def _begin_direct(self, direct: BeginDirect) -> None:
        """Have the only message answered without a task, where that is possible."""
        if len(self._messages) != 1 or self._messages[0][0] or self._packs:
            self._start_task()
            return
        self.connection.num_running += 1
        before = remote_parent.set(_find_parent(self._head.metadata))
        try:
            has_begun = direct(self._messages[0][1], self)
        except Exception as error:
            self.fail(error)
            return
        finally:
            remote_parent.reset(before)
        if has_begun:
            self._messages.clear()
        else:
            self.connection.num_running -= 1
            self._start_task()

    # --- what is sent ---

    def code(self) -> grpc.StatusCode | None:
        """Return the status that the call has ended with; None before."""
        return self._code

    @property
    def is_complete(self) -> bool:
        """Whether everything is sent, or waits for the client's window only."""
        return self.is_ended or self.trailers is not None

    def send_only(self, message: WireMessage) -> None:
        """Send the only message of a response, and its end."""
        if self.is_complete:
            return
        self._code = _OK
        if isinstance(message, bytes) and len(message) <= _SMALL_MESSAGE:
            self.has_begun = True
            self.send_whole(wire.RESPONSE_FIELDS, PREFIX.pack(0, len(message)) + message, wire.OK_FIELDS)
        else:
            self.send_message(message, is_packed=False)
            self.send_trailers(wire.OK_FIELDS)

    def send_message(self, message: WireMessage, *, is_packed: bool) -> None:
        if self.is_ended:
            return
        if not self.has_begun:
            self.has_begun = True
            self.send_headers(wire.GZIP_FIELDS if is_packed else wire.RESPONSE_FIELDS)
        prefix = PREFIX.pack(is_packed, message_size(message))
        if isinstance(message, bytes) and len(message) <= _SMALL_MESSAGE:
            self.send_data(prefix + message)
            return
        first, *more = [message] if isinstance(message, bytes) else message
        if len(first) <= _SMALL_MESSAGE:
            self.send_data(prefix + first)
        else:
            self.send_data(prefix)
            self.send_data(first)
        for part in more:
            self.send_data(part)

    def finish(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        """Send the status, once."""
        if self.is_complete:
            return
        self._code = code
        number = code.value[0]
        if not self.has_begun:
            self.has_begun = True
            self.send_trailers(wire.only_status_block(number, details, metadata))
        elif number == 0:
            self.send_trailers(wire.OK_FIELDS)
        else:
            self.send_trailers(write_fields(wire.status_fields(number, details, metadata)))

    # --- what a direct method calls, once ---

    def respond(self, message: WireMessage) -> None:
        """Answer with `message`."""
        self._end_direct()
        self.send_only(message)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self._end_direct()
        self.finish(*status_of(as_sluice_error(error, self._head.path)))
        error.__traceback__ = None  # its frames hold the job, which holds the error: work for the garbage collector

    def go_on(self, work: Coroutine[Any, Any, WireMessage]) -> None:
        """Answer with the message that `work` returns, or the error that it raises."""
        self.on_gone = None
        self._run_task(self._respond_aside(work))

    async def _respond_aside(self, work: Coroutine[Any, Any, WireMessage]) -> None:
        try:
            self.send_only(await work)
        except Exception as error:
            self.finish(*status_of(as_sluice_error(error, self._head.path)))

    def _end_direct(self) -> None:
        self.on_gone = None  # it holds the job, which holds its receiver, which holds this call
        self.connection.num_running -= 1

    # --- what comes ---

    def take_data(self, payload: bytes | memoryview) -> None:
        """Take messages, or parts of them. Raises StreamFault."""
        self._num_bytes += len(payload)
        if self.trailers is not None:
            return  # the response is complete, and only waits for the client's window
        if self._assembly is None:
            if len(payload) >= PREFIX.size:
                flag, size = PREFIX.unpack_from(payload)
                if size == len(payload) - PREFIX.size and size <= self._host.max_message_bytes:
                    self._put(flag, bytes(payload[PREFIX.size :]))
                    return
            self._assembly = Assembly(self._host.max_message_bytes)
        try:
            messages = self._assembly.add(payload)
        except MessageTooLong as error:
            text = f"SERVER: Received message larger than max ({error.size} vs. {self._host.max_message_bytes})"
            self.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._cancel()
            return
        for each in messages:
            self._put(*each)
        if self._assembly.num_missing > WINDOW_BYTES >> 1 and not self._messages:
            self._allow_more()

    def _allow_more(self) -> None:
        """Let the client send the rest of a message that has begun, and a window more. Nothing else is unread."""
        missing = 0 if self._assembly is None else self._assembly.num_missing
        self.allow(missing + WINDOW_BYTES)

    def _put(self, flag: int, message: bytes | memoryview) -> None:
        if flag > 1:
            raise StreamFault(self.id, Http2Error.PROTOCOL_ERROR, f"a message with the flags {flag}")
        self._messages.append((flag == 1, message))
        if self._direct is not None and len(self._messages) > 1:
            self._start_task()  # which refuses them before there are more
        self._wake()

    def take_end(self) -> None:
        """Let the handler know that there are no more messages. Raises StreamFault for a request cut short."""
        if self._head.content_length not in (None, self._num_bytes):
            text = f"a content-length of {self._head.content_length} with {self._num_bytes} bytes"
            raise StreamFault(self.id, Http2Error.PROTOCOL_ERROR, text)
        if self.is_complete:
            return  # it has been refused for what came with the end
        if self._assembly is not None and self._assembly.is_amid:
            self.finish(grpc.StatusCode.INTERNAL, "the last message is cut short")
            self._cancel()
        elif self._direct is not None:
            self._begin_direct(self._direct)
        else:
            self._wake()

    def take_reset(self) -> None:
        """Cancel the handler: the client is gone."""
        self._code = grpc.StatusCode.CANCELLED
        self._cancel()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif self.on_gone is not None:
            cancel = self.on_gone
            self._end_direct()
            cancel()

    def _expire(self) -> None:
        if self.trailers is None:
            self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        else:
            self.reset(Http2Error.CANCEL)  # the client has not taken the response
        self._cancel()

    def close(self) -> None:
        """Forget what is unsent, and the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().close()

    def stop(self) -> None:
        """End the call because the server ends."""
        self.finish(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        self._cancel()

    # --- the handler ---

    async def _run(self) -> None:
        head = self._head
        remote_parent.set(_find_parent(head.metadata))
        try:
            handler = self._host.methods.find(CallDetails(head.path, head.metadata))
            if handler is None:
                self.finish(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            elif handler.unary_unary is not None:
                await self._run_unary(handler)
            else:
                await self._run_stream(handler)
        except Aborted:
            assert self._status is not None
            await self._wait_for_first()
            self.finish(*self._status)
        except asyncio.CancelledError:
            self.finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except SluiceError as error:
            self.finish(*status_of(error))
        except Exception as error:
            log.error("%s failed unexpectedly", head.path, exc_info=error)
            self.finish(grpc.StatusCode.UNKNOWN, "the server failed unexpectedly; its log has the details")

    async def _run_unary(self, handler: Any) -> None:
        raw = await self._read_only()
        if raw is None:
            return
        answer = await handler.unary_unary(_decode(handler, raw), self)
        if self.is_ended:
            return
        message = _encode(handler, answer)
        if self._packs:
            await self.write(message)
            self.finish(_OK, "")
        else:
            self.send_only(message)

    async def _read_only(self) -> bytes | memoryview | None:
        """Return the message of a call that has one; None where the call has ended with an error instead."""
        while not (self.is_received or self.is_ended or len(self._messages) > 1):
            self._arrived = self.connection.loop.create_future()
            await self._arrived
        if self.is_ended:
            return None
        if len(self._messages) != 1:
            text = f"{self._head.path} takes one message, got {len(self._messages)}"
            self.finish(grpc.StatusCode.UNIMPLEMENTED, text)
            return None
        return await self._unpack(*self._messages.popleft())

    async def _run_stream(self, handler: Any) -> None:
        if handler.unary_stream is not None:
            raw = await self._read_only()
            if raw is None:
                return
            responses = handler.unary_stream(_decode(handler, raw), self)
        else:
            responses = handler.stream_stream(self._requests(handler), self)
        if isasyncgen(responses):
            async for each in responses:
                await self.write(_encode(handler, each))
        else:
            await responses
        self.finish(_OK, "")

    async def _wait_for_first(self) -> None:
        """Wait a moment for the first message of a call that is refused.

        grpc.aio reports a call that has ended while it sends its first message as INTERNAL, whatever the status was.
        """
        if not (self.has_begun or self._num_bytes or self.is_received):
            self._arrived = self.connection.loop.create_future()
            await asyncio.wait((self._arrived,), timeout=_FIRST_MESSAGE_S)

    async def _requests(self, handler: Any) -> AsyncIterator[Any]:
        while (raw := await self.read()) is not grpc.aio.EOF:
            yield _decode(handler, raw)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._host.tasks.discard(task)
        self._host.on_end()
        self._task = None
        self.connection.num_running -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed unexpectedly", self._head.path, exc_info=error)
        if self.trailers is None:
            self.reset(Http2Error.INTERNAL_ERROR)  # no status has been sent, which is a defect

    # --- its context ---

    async def read(self) -> Any:
        """Return the next message, `grpc.aio.EOF` after the last."""
        while not self._messages:
            if self.is_received or self.is_ended:
                return grpc.aio.EOF
            self._allow_more()
            self._arrived = self.connection.loop.create_future()
            await self._arrived
        is_packed, message = self._messages.popleft()
        if not self._messages:
            self._allow_more()
        return await self._unpack(is_packed, message) if is_packed else message

    def take(self, message: WireMessage) -> bool:
        """Send a message; what is sent after the end goes nowhere. Returns False where `ready` must be awaited before
        the next one: many are unsent, or it is to be compressed."""
        if self._packs:
            self._unpacked = message
            return False
        self.send_message(message, is_packed=False)
        return not self.has_much_unsent

    async def ready(self) -> None:
        """Wait until the next message can be sent."""
        if self._unpacked is not None:
            message, self._unpacked = self._unpacked, None
            packed = await pack(join_message(message), self._host.compression_level)
            self.send_message(packed, is_packed=True)
        await self.wait_for_room()

    async def write(self, message: WireMessage) -> None:
        """Send a message, and wait while many are unsent."""
        await give(self, message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> NoReturn:
        """End the call with a status. Raises Aborted."""
        self._code, self._status = code, (code, details, trailing_metadata)
        raise Aborted

    def invocation_metadata(self) -> wire.Metadata:
        return self._head.metadata

    def peer(self) -> str:
        """Return the client's address as gRPC writes it, such as ipv4:10.0.0.1:50000."""
        host, port, *rest = self.connection.transport.get_extra_info("peername") or ("", 0)
        return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}" if rest else f"ipv4:{host}:{port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what a certificate of the client says, by gRPC's names; empty without one."""
        certificate = self.connection.transport.get_extra_info("peercert") or {}
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return {"x509_common_name": [name.encode() for name in names]} if names else {}

    @property
    def _packs(self) -> bool:
        """Whether messages are sent compressed."""
        return self._host.compression_level > 0 and self._head.accepts_gzip

    async def _unpack(self, is_packed: bool, message: bytes | memoryview) -> bytes | memoryview:
        if not is_packed:
            return message
        if self._head.encoding == "identity":
            await self.abort(grpc.StatusCode.INTERNAL, "a compressed message in a call without grpc-encoding")
        return await unpack(message, self._host.max_message_bytes)


def _find_parent(metadata: wire.Metadata) -> RemoteParent | None:
    sent = dict(metadata)
    traceparent, state = sent.get("traceparent"), sent.get("tracestate", "")
    return parse_traceparent(traceparent, str(state)) if isinstance(traceparent, str) else None


def _decode(handler: Any, raw: bytes | memoryview) -> Any:
    return raw if handler.request_deserializer is None else handler.request_deserializer(raw)


def _encode(handler: Any, message: Any) -> WireMessage:
    if isinstance(message, bytes | list):
        return message
    raw: bytes = handler.response_serializer(message)
    return raw
