"""The generate and generate_stream routes, over any model whose tensors JSON can carry."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TypeVar

import orjson

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.exchange import EVENTS, AsgiExchange, RequestTarget, error_json
from sluice.gateway.api.v2.http.generate_request import parse_generate_request
from sluice.gateway.api.v2.http.long_document import INLINE_BYTES
from sluice.gateway.api.v2.http.request import STICKY_HEADER, BodyReader, HeaderReader, refuse_encoding
from sluice.gateway.api.v2.http.tensor_json import encode_value
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.trace import Trace, following
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.http.errors import as_sluice_error
from sluice.gateway.front.http.request import run_while_connected
from sluice.gateway.front.long_work import LONG_ELEMENTS, prepare_inputs, run_aside
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model, ResponseStream
from sluice.serving.request import InferRequest, InferResponse

T = TypeVar("T")
_NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
_MODEL_FAILED = 400
"""Status of every model error: Triton drops the code before it looks at it."""
_MAX_SINGLE_EVENTS = 8
_EVENTS_PER_CHUNK = 64
"""Events that may wait in a stream before they share chunks, and the most in one: long turns delay other streams."""
_NOT_BUFFERED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that tell proxies to forward each event at once."""


class _ResponseWriter:
    """Writes the responses to one request: flat JSON objects, keys in alphabetical order."""

    def __init__(self, model: Model, request_id: str) -> None:
        self._head = {
            "model_name": b'"model_name":' + orjson.dumps(model.name),
            "model_version": b'"model_version":"%d"' % model.version,
        }
        if request_id:
            self._head["id"] = b'"id":' + orjson.dumps(request_id)
        self._keys: dict[str, bytes] = {}

    def body(self, response: InferResponse) -> bytes:
        """Return the JSON of a response that is no error. Raises SluiceError where an output cannot be JSON."""
        members = self._head.copy()
        for name, value in response.parameters.items():
            members.setdefault(name, self._key(name) + orjson.dumps(value))
        for tensor in response.outputs:
            members.setdefault(tensor.name, self._key(tensor.name) + encode_value(tensor))
        return b"{" + b",".join([members[name] for name in sorted(members)]) + b"}"

    def event(self, response: InferResponse) -> bytes:
        """Return the response, or its error, as a server-sent event."""
        if response.error is not None:
            return _error_event(response.error)
        try:
            return b"data: " + self.body(response) + b"\n\n"
        except SluiceError as error:
            return _error_event(error)

    def _key(self, name: str) -> bytes:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = orjson.dumps(name) + b":"
        return key


def _error_event(error: SluiceError) -> bytes:
    """Return the event of a response that failed; the stream may go on."""
    return b"data: " + error_json(error) + b"\n\n"


class GenerateRoute:
    """Answers POST …/generate and …/generate_stream."""

    def __init__(self, server: V2Server, body: BodyReader, headers: HeaderReader) -> None:
        self._server = server
        self._body = body
        self._headers = headers

    async def answer_whole(self, exchange: AsgiExchange, model: Model, target: RequestTarget) -> None:
        """Answer with the one response, as a JSON object. Raises SluiceError, and ClientDisconnect."""
        request = await self._read(exchange, model, is_streaming=False)
        if model.is_retired:  # while the body came in
            model = self._server.models.route(target.name, target.version_number, exchange.header(STICKY_HEADER))
        _refuse_stream(model, request)
        if model.spec.has_sequences:
            model = self._server.models.route_sequence(
                model, request, target.version_number, exchange.header(STICKY_HEADER)
            )
        trace = self._server.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_whole(exchange, model, request, trace))

    async def answer_stream(self, exchange: AsgiExchange, model: Model, target: RequestTarget) -> None:
        """Answer with every response, as server-sent events. Raises like `answer_whole`, before the first event."""
        request = await self._read(exchange, model, is_streaming=True)
        if model.is_retired:  # while the body came in
            model = self._server.models.route(target.name, target.version_number, exchange.header(STICKY_HEADER))
        if model.spec.has_sequences:
            model = self._server.models.route_sequence(
                model, request, target.version_number, exchange.header(STICKY_HEADER)
            )
        trace = self._server.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_stream(exchange, model, request, trace))

    async def _read(self, exchange: AsgiExchange, model: Model, is_streaming: bool) -> InferRequest:
        refuse_encoding(exchange)
        body = await self._body.read(exchange)
        if len(body) > INLINE_BYTES:
            request = await run_aside(lambda: parse_generate_request(body, model, is_streaming))
        else:
            request = parse_generate_request(body, model, is_streaming)
        await prepare_inputs(request, model)
        self._headers.schedule(exchange, request)
        return request


def _refuse_stream(model: Model, request: InferRequest) -> None:
    """Raise INVALID for a request that asks for a stream: it has many responses.

    Decoupled models that stream of themselves run all the same, as with Triton.
    """
    if model.is_decoupled_for(request) and not model.streams_unasked:
        raise invalid("stream", _NOT_ONE_RESPONSE)


async def _read_responses(
    model: Model, request: InferRequest, trace: Trace | None
) -> AsyncGenerator[list[InferResponse], None]:
    """Yield the responses that count, as many at a time as have arrived. Closing cancels the request."""
    gives_any_number, is_over = model.is_decoupled_for(request), False
    with ExitStack() as at_end:
        if trace is not None:
            trace.capture("REQUEST_START")
            at_end.callback(trace.finish)
            at_end.callback(trace.capture, "REQUEST_END")
        with following(trace):
            stream = ResponseStream(model, request)
        at_end.callback(stream.cancel)
        while not is_over:
            arrived = await stream.wait()
            is_over = arrived[-1].is_final
            if gives_any_number:
                arrived = [response for response in arrived if not response.is_empty]
            if arrived and trace is not None:
                trace.capture("INFER_RESPONSE_COMPLETE")
            if arrived:
                yield arrived


async def _send_whole(exchange: AsgiExchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
    counted: list[InferResponse] = []
    async with aclosing(_read_responses(model, request, trace)) as batches:
        async for batch in batches:
            counted += batch
    first_error = counted[0].error if counted else None
    if first_error is not None and _keeps_code(model, first_error):
        raise first_error
    if len(counted) == 1:
        status, body = await _encode(counted, lambda: _json(_ResponseWriter(model, request.id), counted[0]))
    else:
        status = 200 if first_error is None else _MODEL_FAILED
        body = error_json(SluiceError(ErrorCode.INTERNAL, _NOT_ONE_RESPONSE))
    await exchange.reply_pieces(status, [body])


async def _encode(responses: list[InferResponse], encode: Callable[[], T]) -> T:
    """Return the result of `encode`, from a thread where the responses are long."""
    num_elements = sum(tensor.num_elements for response in responses for tensor in response.outputs)
    return await run_aside(encode) if num_elements > LONG_ELEMENTS else encode()


def _keeps_code(model: Model, error: SluiceError) -> bool:
    """Whether the client gets the error's code: an LLM's always, a pipeline's where a step cannot serve."""
    return isinstance(model, LlmModel) or (model.spec.platform == "ensemble" and error.code in CANNOT_SERVE)


def _json(writer: _ResponseWriter, response: InferResponse) -> tuple[int, bytes]:
    """Return status and body of a response, or of the error that it is or becomes."""
    try:
        if response.error is not None:
            raise response.error
        return 200, writer.body(response)
    except SluiceError as error:
        return _MODEL_FAILED, error_json(error)


async def _send_stream(exchange: AsgiExchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
    writer = _ResponseWriter(model, request.id)
    try:
        with ending_with_key():
            async with aclosing(_read_responses(model, request, trace)) as batches:
                async for batch in batches:
                    if not exchange.has_started:
                        await _start_stream(exchange, model, writer, batch[0])
                    for events in _grouped(batch):
                        await exchange.write(await _encode(events, partial(_join_events, writer, events)))
    except Exception as error:
        if not exchange.has_started:
            raise
        await exchange.write(_error_event(as_sluice_error(error, exchange.request_id)))
    if not exchange.has_started:
        await exchange.start(200, EVENTS, _NOT_BUFFERED)
    await exchange.end()


def _join_events(writer: _ResponseWriter, responses: list[InferResponse]) -> bytes:
    return b"".join(map(writer.event, responses))


def _grouped(batch: list[InferResponse]) -> Iterator[list[InferResponse]]:
    """Split `batch` into chunks: one event each, as in Triton, unless many wait and writes would cost the most."""
    size = 1 if len(batch) <= _MAX_SINGLE_EVENTS else _EVENTS_PER_CHUNK
    return (batch[start : start + size] for start in range(0, len(batch), size))


async def _start_stream(exchange: AsgiExchange, model: Model, writer: _ResponseWriter, first: InferResponse) -> None:
    """Send the head: the first response decides the status. An LLM's error is raised, as its stream has not begun."""
    if first.error is not None and _keeps_code(model, first.error):
        raise first.error
    status, _ = await _encode([first], lambda: _json(writer, first))
    await exchange.start(status, EVENTS, _NOT_BUFFERED)
