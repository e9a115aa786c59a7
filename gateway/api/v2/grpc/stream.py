"""ModelStreamInfer: any number of requests on one stream, and their responses as they come.

Requests run concurrently. Responses of models that are not decoupled come in the order of their requests, as Triton
sends them; those of decoupled models come at once. An error is a message, and the stream goes on.
"""

import asyncio
from collections import deque
from functools import partial
from secrets import token_hex
from time import perf_counter_ns
from typing import Any

import grpc

from sluice.engine.client.stream import Consumer
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.infer import InferReader, refusal_message, stream_message
from sluice.gateway.api.v2.grpc.messages import InferMessage, WireMessage, message_size, split_message
from sluice.gateway.api.v2.grpc.methods import GRPC_CODE, as_sluice_error, finish, open_root, parse_peer
from sluice.gateway.api.v2.infer import V2Request, is_short, submit
from sluice.gateway.api.v2.trace import Trace
from sluice.gateway.calls import Call, current_call
from sluice.gateway.front.long_work import run_aside
from sluice.record.spans import Span, current_span
from sluice.serving.job import InferJob
from sluice.serving.model import MAX_UNREAD, Outbox
from sluice.serving.request import InferResponse

MAX_IN_FLIGHT = 1024
"""Most requests of one stream that are read and not answered; the client's next ones wait in the connection."""

_METHOD = "ModelStreamInfer"


class _Slot:
    """One request's place in its stream."""

    __slots__ = ("call", "held", "is_ordered", "is_over", "job", "parsed", "root", "status", "trace")

    def __init__(self) -> None:
        self.parsed: V2Request | None = None
        self.job: InferJob | None = None
        self.held: list[InferResponse] = []
        """Responses that wait for those of earlier requests."""
        self.is_ordered = True
        self.is_over = False
        self.trace: Trace | None = None
        self.call: Call | None = None
        self.root: Span | None = None
        """Where its time is noted; None where nobody records."""
        self.status: int | None = None

    def end(self) -> None:
        """End the request's trace and its call. Idempotent."""
        if self.trace is not None:
            self.trace.finish()
        if self.call is not None:
            self.call.release()
            self.call = None
        if self.root is not None:
            finish(self.root, self.status)
            self.root = None


class InferStream:
    """One call: a task of its own reads, and the responses of models are pushed to the call."""

    def __init__(self, reader: InferReader, context: Any, writer: Consumer[WireMessage]) -> None:
        """`context` is the call's, from which it reads; `writer` takes its messages."""
        self._reader = reader
        self._context = context
        self._writer = writer
        self._slots: set[_Slot] = set()
        """Requests that have not ended, or whose responses wait for those of earlier ones."""
        self._order: deque[_Slot] = deque()
        """Requests of `_slots` whose responses come in order, oldest first."""
        self._unwritten: Outbox[tuple[_Slot, InferResponse]] = Outbox()
        self._long: tuple[_Slot, InferResponse] | None = None
        """A response that takes long to write."""
        self._room: asyncio.Future[None] | None = None
        self._has_ended = False
        self._failure: SluiceError | None = None
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the client has closed its side and has all responses. Raises SluiceError at an early end."""
        self._reading = asyncio.create_task(self._read())
        try:
            await self._unwritten.pass_to(self)
            if self._failure is not None:
                raise self._failure
        finally:
            self._reading.cancel()
            self._cancel_all()
            if self._long is not None:
                self._long[0].end()

    def finish(self, error: SluiceError) -> None:
        """Read no more requests; when those in flight are answered, end with `error`."""
        if self._failure is None:
            self._failure = error
        if self._reading is not None:
            self._reading.cancel()
        self._end()

    async def _read(self) -> None:
        try:
            while (raw := await self._context.read()) is not grpc.aio.EOF:
                await self._begin(split_message(raw), len(raw))
                while self._is_full:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
            self._end()
        except Exception as error:
            self._failure = as_sluice_error(error, _METHOD)
            self._end()

    async def _begin(self, message: InferMessage, num_bytes: int) -> None:
        received_ns = perf_counter_ns()
        failure: Exception | None = None
        call = current_call.get()
        if call is not None:
            call = call.sibling(message.header.id or token_hex(12))
            call.source, call.bytes_in = parse_peer(self._context.peer()), num_bytes
            current_call.set(call)
        if self._reader.tracer.is_exporting:
            open_root(self._reader.tracer, _METHOD, message.header.id, received_ns)
        try:
            if call is not None:
                call.identity = self._reader.access.resume(call.identity, None)
                await call.begin()
            parsed = await self._reader.read(message, self._context, received_ns)
        except Exception as error:
            failure = error
        slot = _Slot()
        slot.call, slot.root = call, current_span.get()
        self._slots.add(slot)
        try:
            if failure is not None:
                raise failure
            slot.parsed = parsed
            slot.is_ordered = not (parsed.is_decoupled or parsed.model.spec.is_decoupled)
            if slot.is_ordered:
                self._order.append(slot)
            try:
                job = submit(self._reader.server, parsed, partial(self._receive, slot))
            finally:
                slot.trace = parsed.trace
            if not slot.is_over or slot.trace is not None:
                slot.job = job
            if self._failure is not None:
                job.cancel()  # it answered too much within `submit`
        except Exception as error:
            self._refuse(slot, message.header.id, as_sluice_error(error, _METHOD))
        if slot.root is not None:
            current_span.set(None)  # the next request of this task may have no recording

    def _refuse(self, slot: _Slot, request_id: str, error: SluiceError) -> None:
        """Answer a request that has not begun with `error`, in its turn."""
        slot.parsed = None
        if not slot.is_ordered or not self._order or self._order[-1] is not slot:
            slot.is_ordered = True
            self._order.append(slot)
        self._receive(slot, InferResponse(error=error, id=request_id))

    def _receive(self, slot: _Slot, response: InferResponse) -> None:
        if response.is_final:
            slot.is_over = True
            if slot.trace is None:
                slot.job = None  # slot and job would hold each other until a collection
        if not slot.is_ordered:
            self._put(slot, response)
            if slot.is_over:
                self._slots.discard(slot)
        elif self._order and self._order[0] is slot:
            self._put(slot, response)
            if slot.is_over:
                self._release()
        else:
            slot.held.append(response)
        self._end_if_done()

    def _release(self) -> None:
        """Put the responses that waited for the first request in order, which has ended."""
        order = self._order
        while order and order[0].is_over:
            self._slots.discard(order.popleft())
            if order:
                held, order[0].held = order[0].held, []
                for response in held:
                    self._put(order[0], response)

    def _put(self, slot: _Slot, response: InferResponse) -> None:
        self._unwritten.put((slot, response))
        if len(self._unwritten) > MAX_UNREAD:
            self._cancel_all()
            self.finish(SluiceError(ErrorCode.OVERLOADED, f"the client fell {MAX_UNREAD} responses behind"))

    def take(self, item: tuple[_Slot, InferResponse]) -> bool:
        """Write a response."""
        slot, response = item
        if slot.parsed is not None and not is_short(response, slot.parsed.plan):
            self._long = item
            return False
        return self._write(slot, response, _message(slot, response))

    async def ready(self) -> None:
        if self._long is not None:
            slot, response = self._long
            self._write(slot, response, await run_aside(partial(_message, slot, response)))
            self._long = None
        await self._writer.ready()

    def _write(self, slot: _Slot, response: InferResponse, message: WireMessage | None) -> bool:
        """Send the message for a response, None where the client gets none. Returns whether the next may follow."""
        is_ready = message is None or self._writer.take(message)
        if response.is_final or response.error is not None:
            code = grpc.StatusCode.OK if response.error is None else GRPC_CODE[response.error.code]
            slot.status = code.value[0]
        if slot.call is not None:
            slot.call.bytes_out += message_size(message or b"")
            slot.call.status = slot.status
        if response.is_final:
            slot.end()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return is_ready

    @property
    def _is_full(self) -> bool:
        return len(self._slots) + len(self._unwritten) >= MAX_IN_FLIGHT

    def _end(self) -> None:
        self._has_ended = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._has_ended and not self._slots:
            self._unwritten.end()

    def _cancel_all(self) -> None:
        slots, self._slots = self._slots, set()
        self._order.clear()
        for slot, _ in self._unwritten.take():
            slot.end()
        for slot in slots:
            if slot.job is not None:
                slot.job.cancel()
            slot.end()


def _message(slot: _Slot, response: InferResponse) -> WireMessage | None:
    """Return the message for `response` in its wire form; None where the client gets none."""
    parsed = slot.parsed
    if parsed is None:
        assert response.error is not None
        return refusal_message(response.id, response.error)
    if slot.trace is not None:
        if response.is_final and slot.job is not None:
            slot.trace.capture_job(slot.job)
        slot.trace.capture("INFER_RESPONSE_COMPLETE")
        slot.trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
        slot.trace.capture("GRPC_SEND_START")
    if response.is_empty and parsed.is_decoupled and not parsed.wants_empty_final:
        return None
    return stream_message(parsed, response)
