"""The generate and generate_stream routes, over any model that takes and gives what JSON can say."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from gateway.http.disconnect import run_while_connected
from gateway.http.errors import as_sluice_error
from gateway.http.v2.body import BodyReader
from gateway.http.v2.errors import error_json
from gateway.http.v2.exchange import EVENTS, Exchange
from gateway.http.v2.generate_request import read_generate
from gateway.http.v2.generate_response import WRONG_COUNT, GenerateWriter, error_event
from gateway.http.v2.headers import STICKY, HeaderReader
from gateway.http.v2.infer_request import LARGE_BYTES
from gateway.http.v2.target import Target
from gateway.v2.service import Service
from gateway.v2.trace import Trace
from pipelines.llm.model import LlmModel
from serving.model import Model, ResponseStream
from serving.request import InferRequest, InferResponse
from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid

_MODEL_FAILED = 400
"""Whatever a model's error says: Triton forgets the code before it looks at it."""
_MOST_SINGLE = 8
_MOST_TOGETHER = 64
"""Events that a stream is behind before they share chunks, and how many do: long turns of the loop delay the others."""
_NOT_BUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Tells proxies to pass each event on as it comes."""


class GenerateRoute:
    """Answers POST …/generate and …/generate_stream."""

    def __init__(self, service: Service, body: BodyReader, headers: HeaderReader) -> None:
        self._service = service
        self._body = body
        self._headers = headers

    async def answer_whole(self, exchange: Exchange, model: Model, target: Target) -> None:
        """One response, as one JSON object. Raises SluiceError, and ClientDisconnect where nobody waits any more."""
        request = await self._read(exchange, model, is_streaming=False)
        if model.is_retired:  # while the body came in
            model = self._service.route(target.name, target.version_number, exchange.header(STICKY))
        _refuse_stream(model, request)
        if model.spec.has_sequences:
            model = self._service.route_sequence(model, request, target.version_number, exchange.header(STICKY))
        trace = self._service.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_whole(exchange, model, request, trace))

    async def answer_stream(self, exchange: Exchange, model: Model, target: Target) -> None:
        """Every response, as server-sent events. Raises as `answer_whole`, before the first event."""
        request = await self._read(exchange, model, is_streaming=True)
        if model.is_retired:  # while the body came in
            model = self._service.route(target.name, target.version_number, exchange.header(STICKY))
        if model.spec.has_sequences:
            model = self._service.route_sequence(model, request, target.version_number, exchange.header(STICKY))
        trace = self._service.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_stream(exchange, model, request, trace))

    async def _read(self, exchange: Exchange, model: Model, is_streaming: bool) -> InferRequest:
        if exchange.header(b"content-encoding") not in ("", "identity"):
            raise invalid("content-encoding", "Unsupported content-encoding, only 'identity' is supported.")
        body = await self._body.read(exchange)
        if len(body) < LARGE_BYTES:
            request = read_generate(body, model, is_streaming)
        else:
            request = await asyncio.to_thread(read_generate, body, model, is_streaming)
        self._headers.schedule(exchange, request)
        return request


def _refuse_stream(model: Model, request: InferRequest) -> None:
    """What is asked to stream gives many responses, which is known before it begins.

    Models that never give one are asked all the same, as Triton asks them.
    """
    if model.is_decoupled_for(request) and not model.streams_unasked:
        raise invalid("stream", WRONG_COUNT)


def _responses(model: Model, request: InferRequest, trace: Trace | None) -> AsyncGenerator[list[InferResponse], None]:
    """The responses that count, as many at a time as have come. Closing it cancels the request, and ends its trace."""
    batches = _counted(model, request)
    return batches if trace is None else _traced(batches, trace)


async def _traced(
    batches: AsyncGenerator[list[InferResponse], None], trace: Trace
) -> AsyncGenerator[list[InferResponse], None]:
    trace.capture("REQUEST_START")
    try:
        async with aclosing(batches):
            async for batch in batches:
                trace.capture("INFER_RESPONSE_COMPLETE")
                yield batch
    finally:
        trace.capture("REQUEST_END")
        trace.finish()


async def _counted(model: Model, request: InferRequest) -> AsyncGenerator[list[InferResponse], None]:
    stream = ResponseStream(model, request)
    gives_any_number = model.is_decoupled_for(request)
    try:
        is_over = False
        while not is_over:
            come = await stream.wait()
            is_over = come[-1].is_final
            if gives_any_number:
                come = [response for response in come if not response.is_empty]
            if come:
                yield come
    finally:
        stream.cancel()


async def _send_whole(exchange: Exchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
    counted: list[InferResponse] = []
    async with aclosing(_responses(model, request, trace)) as batches:
        async for batch in batches:
            counted += batch
    first_error = counted[0].error if counted else None
    if first_error is not None and _keeps_code(model, first_error):
        raise first_error
    if len(counted) == 1:
        status, body = _json(GenerateWriter(model, request.id), counted[0])
    else:
        status = 200 if first_error is None else _MODEL_FAILED
        body = error_json(SluiceError(ErrorCode.INTERNAL, WRONG_COUNT))
    await exchange.reply(status, body)


def _keeps_code(model: Model, error: SluiceError) -> bool:
    """Whether the code is told: an LLM's always is, and a pipeline's where a step of it cannot serve."""
    return isinstance(model, LlmModel) or (model.spec.platform == "ensemble" and error.code in CANNOT_SERVE)


def _json(writer: GenerateWriter, response: InferResponse) -> tuple[int, bytes]:
    """Status and body of a response, or of the error that it is or becomes."""
    try:
        if response.error is not None:
            raise response.error
        return 200, writer.body(response)
    except SluiceError as error:
        return _MODEL_FAILED, error_json(error)


async def _send_stream(exchange: Exchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
    writer = GenerateWriter(model, request.id)
    try:
        async with aclosing(_responses(model, request, trace)) as batches:
            async for batch in batches:
                if not exchange.has_started:
                    await _start_stream(exchange, model, writer, batch[0])
                for events in _grouped(batch):
                    await exchange.write(b"".join(map(writer.event, events)))
    except Exception as error:
        if not exchange.has_started:
            raise
        await exchange.write(error_event(as_sluice_error(error, exchange.request_id)))
    if not exchange.has_started:
        await exchange.start(200, EVENTS, _NOT_BUFFERED)
    await exchange.end()


def _grouped(batch: list[InferResponse]) -> Iterator[list[InferResponse]]:
    """Each event is a chunk of its own, as in Triton, but where many wait: then the writes would cost the most."""
    size = 1 if len(batch) <= _MOST_SINGLE else _MOST_TOGETHER
    return (batch[start : start + size] for start in range(0, len(batch), size))


async def _start_stream(exchange: Exchange, model: Model, writer: GenerateWriter, first: InferResponse) -> None:
    """The first response decides the status. An LLM's error is raised: its stream has not begun."""
    if first.error is not None and _keeps_code(model, first.error):
        raise first.error
    status, _ = _json(writer, first)
    await exchange.start(status, EVENTS, _NOT_BUFFERED)
