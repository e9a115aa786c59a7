"""The generate and generate_stream routes, over any model whose tensors JSON can carry: keys of a request that are
inputs become tensors, others parameters."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Sized
from contextlib import ExitStack, suppress
from math import prod
from typing import TypeVar

import orjson
from starlette.types import Message

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.exchange import (
    EVENTS,
    STICKY_HEADER,
    AsgiExchange,
    BodyReader,
    HeaderReader,
    RequestTarget,
    error_json,
    refuse_encoding,
)
from sluice.gateway.api.v2.http.infer_request import PROTOCOL, already_exists, max_string_chars, parse_custom_parameter
from sluice.gateway.api.v2.http.json_document import (
    INLINE_BYTES,
    find,
    has,
    members,
    mistyped,
    parse_document,
    string,
    text,
    unreadable,
)
from sluice.gateway.api.v2.http.tensor_json import check_strings, count_elements, encode_value, parse_tensor
from sluice.gateway.api.v2.infer import note
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.trace import Trace, following
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.http.errors import as_sluice_error
from sluice.gateway.front.http.request import MAX_TIMEOUT_S, run_while_connected
from sluice.gateway.front.http.sse import FrameWriter
from sluice.gateway.front.long_work import LONG_ELEMENTS, prepare_inputs, run_aside
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model, ResponseStream
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import TensorSpec
from sluice.serving.tensors.datatypes import BYTES

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
_NESTED = "parameters"
"""Key of an object whose keys count as if they stood beside it."""

_MAX_LONG_KEYS = 64
"""Most keys of a long request: each is searched in all of it."""
_MAX_SPACE = 64
_SEARCHED_BYTES = 1 << 20

_SCHEDULING = {
    "priority": (range(-(2**31), 2**31), "a 32-bit integer (lower runs earlier)"),
    "timeout": (
        range(int(MAX_TIMEOUT_S * 1e6) + 1),
        f"a whole number of microseconds from 0 (none) to {MAX_TIMEOUT_S * 1e6:.0f}",
    ),
}
"""Parameters that schedule an LLM's requests, as on its other routes. For other models they are plain parameters."""


def parse_generate_request(body: bytes | bytearray, model: Model, is_streaming: bool) -> InferRequest:
    """Parse the request to `model` in `body`. Raises SluiceError in Triton's words."""
    document = parse_document(body, max_string_chars(model))
    request = InferRequest(inputs={}, protocol=PROTOCOL, streams_by_default=is_streaming)
    for name in find_repeated(document, body):
        if name in model.spec.inputs:
            raise already_exists(name, request)
        raise invalid(name, f"{request.log_prefix}'{name}' already exists in request")
    if has(document, "id"):
        request.id = text(string(find(document, "id"), "Unable to parse 'id': "), "id")
    for name, value in members(document).items():
        if name != _NESTED:
            _parse_member(name, value, request, model)
            continue
        if name in model.spec.inputs:
            raise invalid(name, f"Keyword '{name}' for nested schema also given as input tensor name")
        if not isinstance(value, dict):
            raise unreadable(f"Expected JSON object for keyword: '{name}': " + mistyped("object"))
        _parse_nested(value, request, model)
    return request


def find_repeated(document: object, body: bytes | bytearray) -> list[str]:
    """Return the keys that stand more than once in one object of `document`, which was parsed from `body`, by their
    second places.

    The objects of a long body count as one: it is searched, because a parser would hold the interpreter's lock for all
    of it. Raises INVALID for a long body with many keys.
    """
    if len(body) <= INLINE_BYTES:
        return _find_in_objects(body)
    names = [name for each in (document, find(document, _NESTED)) if isinstance(each, dict) for name in each]
    if len(names) > _MAX_LONG_KEYS:
        text = f"a body of more than {INLINE_BYTES} bytes may have {_MAX_LONG_KEYS} keys, got {len(names)}"
        raise SluiceError(ErrorCode.INVALID, text)
    return [name for name in names if _stands_twice(body, f'"{name}"'.encode("utf-8", "surrogateescape"))]


def _find_in_objects(body: bytes | bytearray) -> list[str]:
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                repeated.append(name)
            seen.add(name)
        return dict(pairs)

    with suppress(ValueError, RecursionError):  # what only Triton's tolerant reader takes
        json.loads(body.removeprefix(BOM_UTF8).decode("utf-8", "surrogateescape"), object_pairs_hook=note)
    return repeated


def _stands_twice(body: bytes | bytearray, spelled: bytes) -> bool:
    """Whether two keys of `body` are `spelled` so. Strings that are values may be, too."""
    num_found, start = 0, 0
    while start < len(body) and num_found < 2:
        end = start + _SEARCHED_BYTES  # a search holds the interpreter's lock
        at = body.find(spelled, start, end + len(spelled))
        if at < 0:
            start = end
            continue
        start = at + len(spelled)
        num_found += body[start : start + _MAX_SPACE].lstrip(b" \t\r\n")[:1] == b":"
        start -= 1
    return num_found > 1


def _parse_nested(nested: dict[str, object], request: InferRequest, model: Model) -> None:
    for name, value in nested.items():
        try:
            _parse_member(name, value, request, model)
        except SluiceError as error:
            raise SluiceError(error.code, f"Converting keyword: '{_NESTED}': {error.message}") from None


def _parse_member(name: str, value: object, request: InferRequest, model: Model) -> None:
    spec = model.spec.inputs.get(name)
    if spec is None:
        if name in _SCHEDULING and isinstance(model, LlmModel):
            _parse_scheduling(name, value, request)
        else:
            request.parameters[name] = parse_custom_parameter(name, value)
        return
    dims = (-1, *spec.dims) if model.spec.max_batch_size > 0 else spec.dims
    if spec.data_type is BYTES:
        check_strings(value)  # before the shape, as Triton, which adds up their lengths first
    num_elements = count_elements(value)
    shape = _shape(spec, dims, num_elements)
    tensor = parse_tensor(name, spec.data_type.name, shape, value, num_elements)
    if name in request.inputs:
        raise already_exists(name, request)
    request.inputs[name] = tensor


def _parse_scheduling(name: str, value: object, request: InferRequest) -> None:
    allowed, words = _SCHEDULING[name]
    if type(value) is not int or value not in allowed:
        raise invalid(name, f"parameter '{name}' must be {words}")
    if name == "priority":
        request.priority = value
    else:
        request.timeout_us = value


def _shape(spec: TensorSpec, dims: tuple[int, ...], num_elements: int) -> tuple[int, ...]:
    """Return `dims` with the last free one as long as the elements need, and other free ones 1.

    Raises INVALID where `num_elements` cannot be shaped so.
    """
    num_fixed = prod(dim for dim in dims if dim != -1)
    if num_fixed == 0 or num_elements % num_fixed or (-1 not in dims and num_elements != num_fixed):
        raise invalid(spec.name, f"The schema can not convert input '{spec.name}' to tensor with proper shape")
    left, shape = num_elements // num_fixed, []
    for dim in reversed(dims):
        shape.append(left if dim == -1 else dim)
        if dim == -1:
            left = 1
    return tuple(reversed(shape))


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
        model = self._route(exchange, model, target, request, is_streaming=False)
        trace = self._server.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_whole(exchange, model, request, trace))

    async def answer_stream(self, exchange: AsgiExchange, model: Model, target: RequestTarget) -> None:
        """Answer with every response, as server-sent events. Raises like `answer_whole`, before the first event."""
        request = await self._read(exchange, model, is_streaming=True)
        model = self._route(exchange, model, target, request, is_streaming=True)
        trace = self._server.trace.begin(model, request)
        await run_while_connected(exchange.receive, _send_stream(exchange, model, request, trace))

    def _route(
        self, exchange: AsgiExchange, model: Model, target: RequestTarget, request: InferRequest, *, is_streaming: bool
    ) -> Model:
        """Return the version of `model` that is to run a request which has been read."""
        models, version, key = self._server.models, target.version_number, exchange.header(STICKY_HEADER)
        if model.is_retired:  # while the body came in
            model = models.route(target.name, version, key)
        if not is_streaming:
            _refuse_stream(model, request)
        return models.route_sequence(model, request, version, key) if model.spec.has_sequences else model

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


class _Responses:
    """Takes the responses to one request that count."""

    def __init__(self, model: Model, request: InferRequest, trace: Trace | None) -> None:
        self.found: list[InferResponse] = []
        self._model = model
        self._request = request
        self._trace = trace
        self._gives_any_number = model.is_decoupled_for(request)
        self._unread: Sized = ()
        """The responses that have come and were not taken yet."""

    async def run(self) -> None:
        """Run the request up to its last response. Cancelling cancels it."""
        trace = self._trace
        with ExitStack() as at_end:
            if trace is not None:
                trace.capture("REQUEST_START")
                at_end.callback(trace.finish)
                at_end.callback(trace.capture, "REQUEST_END")
            with following(trace):
                self._unread = stream = ResponseStream(self._model, self._request)
            await stream.pass_to(self)

    def take(self, response: InferResponse) -> bool:
        if not (response.is_empty and self._gives_any_number):
            note(self._trace, "INFER_RESPONSE_COMPLETE")
            self.found.append(response)
        return True

    async def ready(self) -> None: ...


class _EventWriter(_Responses):
    """Writes the responses as server-sent events: one in each chunk, as in Triton, unless many wait and writes would
    cost the most. The first one decides the status; an LLM's error is raised, as its stream has not begun."""

    def __init__(self, exchange: AsgiExchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
        super().__init__(model, request, trace)
        self._exchange = exchange
        self._encoder = _ResponseWriter(model, request.id)
        self._writer: FrameWriter | None = None

    def take(self, response: InferResponse) -> bool:
        super().take(response)
        num_found, num_unread = len(self.found), len(self._unread)
        if num_unread and num_found < _EVENTS_PER_CHUNK and num_found + num_unread > _MAX_SINGLE_EVENTS:
            return True  # the next one comes at once
        if not num_found:
            return True
        if self._writer is None or _are_long(self.found):
            return False
        return self._writer.take(self._join())

    async def ready(self) -> None:
        if self._writer is None:
            self._writer = await self._begin(self.found[0])
        if self.found:
            self._writer.take(await _encode(self.found, self._join))
        await self._writer.ready()

    def _join(self) -> bytes:
        found, self.found = self.found, []
        return b"".join(map(self._encoder.event, found))

    async def _begin(self, first: InferResponse) -> FrameWriter:
        if first.error is not None and _keeps_code(self._model, first.error):
            raise first.error
        status, _ = await _encode([first], lambda: _json(self._encoder, first))
        exchange = self._exchange
        exchange.has_started = True
        headers = [(b"content-type", EVENTS), *_NOT_BUFFERED]
        begin: Message = {"type": "http.response.start", "status": status, "headers": headers}
        return FrameWriter(exchange.scope, exchange.send, begin, b"", 0.0)


async def _send_whole(exchange: AsgiExchange, model: Model, request: InferRequest, trace: Trace | None) -> None:
    responses = _Responses(model, request, trace)
    await responses.run()
    counted = responses.found
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
    return await run_aside(encode) if _are_long(responses) else encode()


def _are_long(responses: list[InferResponse]) -> bool:
    return sum(tensor.num_elements for response in responses for tensor in response.outputs) > LONG_ELEMENTS


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
    events, last = _EventWriter(exchange, model, request, trace), b""
    try:
        with ending_with_key():
            await events.run()
    except Exception as error:
        if not exchange.has_started:
            raise
        events.found.clear()
        await events.ready()
        last = _error_event(as_sluice_error(error, exchange.request_id))
    if not exchange.has_started:
        await exchange.start(200, EVENTS, _NOT_BUFFERED)
    await exchange.end(last)
