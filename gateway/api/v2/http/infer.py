"""The infer route: the one request that most clients send, so everything here is short.

A request whose body is complete and short is read, submitted and answered without a task of its own.
"""

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

from starlette.requests import ClientDisconnect

from sluice.gateway.api.v2.http.exchange import (
    BINARY,
    JSON_LENGTH_HEADER,
    STICKY_HEADER,
    BodyReader,
    HeaderReader,
    RequestTarget,
    refusal_of,
)
from sluice.gateway.api.v2.http.infer_request import (
    parse_header_length,
    parse_infer_request,
    parse_plain_request,
    takes_long,
)
from sluice.gateway.api.v2.http.infer_response import INLINE_BYTES, InferBody, compress_body, encode_infer_response
from sluice.gateway.api.v2.infer import Inference, V2Request, is_short, note, refuse_streams
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.shared_memory import LongCopyError, SharedMemoryRegistry
from sluice.gateway.api.v2.trace import Trace
from sluice.gateway.front.http.content_coding import ENCODING
from sluice.gateway.front.http.exchange import JSON, Exchange
from sluice.gateway.front.long_work import has_short_inputs, prepare_inputs, run_aside
from sluice.serving.model import Model
from sluice.serving.request import InferResponse

log = logging.getLogger("sluice.gateway.api.v2.http.app")
_ONLY_FOR_STREAMS = "HTTP end point doesn't support models with decoupled transaction policy"
ChooseModel = Callable[[Exchange, RequestTarget], Model]


class InferRoute:
    """Answers POST …/infer."""

    def __init__(self, server: V2Server, body: BodyReader, headers: HeaderReader, choose_model: ChooseModel) -> None:
        self._server = server
        self._body = body
        self._headers = headers
        self._choose_model = choose_model

    def begin(self, exchange: Exchange, target: RequestTarget) -> None:
        """Answer a request whose body is complete: now, or later where it is long or its model takes time."""
        log.debug("HTTP request: POST %s", exchange.path)
        try:
            if not self._begin_short(exchange, target):
                exchange.go_on(self.answer(exchange, target))
        except Exception as error:
            refuse(exchange, error)

    def _begin_short(self, exchange: Exchange, target: RequestTarget) -> bool:
        body = exchange.body
        if body is None or ENCODING in exchange.headers:
            return False
        model = self._choose_model(exchange, target)
        refuse_streams(model, _ONLY_FOR_STREAMS)
        received_ns = perf_counter_ns()
        self._body.check_length(exchange, len(body))
        parsed = decode_now(body, _json_length(exchange, body), model, self._server.shared_memory)
        if parsed is None or not has_short_inputs(parsed.request):
            return False
        self._run(exchange, parsed, target, received_ns)
        return True

    async def answer(self, exchange: Exchange, target: RequestTarget) -> None:
        """Read a request of any length and run it; the exchange gets its answer. Raises ClientDisconnect alone."""
        try:
            model = self._choose_model(exchange, target)
            refuse_streams(model, _ONLY_FOR_STREAMS)
            received_ns = perf_counter_ns()
            body = await self._body.read_decoded(exchange)
            parsed = await decode(body, _json_length(exchange, body), model, self._server.shared_memory)
            del body  # a model may run for long
            self._run(exchange, parsed, target, received_ns)
        except ClientDisconnect:
            raise
        except Exception as error:
            refuse(exchange, error)

    def _run(self, exchange: Exchange, parsed: V2Request, target: RequestTarget, received_ns: int) -> None:
        self._headers.schedule(exchange, parsed.request)
        self._headers.forward(exchange, parsed.request)
        parsed.version, parsed.key = target.version_number, exchange.header(STICKY_HEADER)
        if self._server.trace.is_on:
            parsed.received = (("HTTP_RECV_START", received_ns), ("HTTP_RECV_END", perf_counter_ns()))
        inference = _HttpInference(parsed, exchange)
        if inference.start(self._server, _ONLY_FOR_STREAMS):
            exchange.on_gone = inference.cancel
            if exchange.is_gone:
                inference.cancel()


def _json_length(exchange: Exchange, body: bytes | bytearray) -> int:
    length = exchange.headers.get(JSON_LENGTH_HEADER)
    return len(body) if length is None else parse_header_length(length.decode("latin-1"), len(body))


def decode_now(
    body: bytes | bytearray, json_length: int, model: Model, shared_memory: SharedMemoryRegistry
) -> V2Request | None:
    """Return the request to `model` in `body`; None for one that takes long to read. Raises SluiceError in Triton's
    words."""
    if takes_long(body, json_length):
        return None
    parsed = parse_plain_request(body, json_length, model) if json_length else None
    if parsed is not None:
        return parsed
    try:
        return parse_infer_request(body, json_length, model, shared_memory)
    except LongCopyError:
        return None


async def decode(
    body: bytes | bytearray, json_length: int, model: Model, shared_memory: SharedMemoryRegistry
) -> V2Request:
    """Return the request like `decode_now`, of any length, with its strings prepared: what is long, on a thread."""
    parsed = decode_now(body, json_length, model, shared_memory)
    if parsed is None:
        parsed = await run_aside(lambda: parse_infer_request(body, json_length, model, shared_memory))
    await prepare_inputs(parsed.request, model)
    return parsed


class _HttpInference(Inference):
    """A request whose answer goes to an exchange."""

    __slots__ = ("_exchange",)

    def __init__(self, parsed: V2Request, exchange: Exchange) -> None:
        super().__init__(parsed)
        self._exchange = exchange

    def respond(self, response: InferResponse, trace: Trace | None) -> None:
        """Send the answer, or leave it to a task where that takes long."""
        exchange = self._exchange
        try:
            answer = self._encode(response) if is_short(response, self.parsed.plan) else None
            if answer is None or sum(map(len, answer.pieces)) >= INLINE_BYTES:
                exchange.go_on(self._respond_aside(response, answer, trace))
                return
            pieces, (content_type, headers) = answer.pieces, _body_headers(answer.json_length)
            accept = exchange.headers.get(b"accept-encoding")
            if accept:
                pieces, more = compress_body(pieces, accept.decode("latin-1"))
                headers += more
            note(trace, "HTTP_SEND_START")
            exchange.answer(200, bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces), content_type, headers)
            note(trace, "HTTP_SEND_END")
        except Exception as error:
            self.fail(error)
        if trace is not None:
            trace.finish()

    def _encode(self, response: InferResponse) -> InferBody:
        return encode_infer_response(self.parsed.model, response, self.parsed.plan)

    async def _respond_aside(self, response: InferResponse, answer: InferBody | None, trace: Trace | None) -> None:
        exchange = self._exchange
        try:
            if answer is None:
                answer = await run_aside(lambda: self._encode(response))
            pieces, accept = answer.pieces, exchange.header(b"accept-encoding")
            content_type, headers = _body_headers(answer.json_length)
            if accept:
                pieces, more = await run_aside(partial(compress_body, pieces, accept))
                headers += more
            note(trace, "HTTP_SEND_START")
            await exchange.reply_pieces(200, pieces, content_type, headers)
            note(trace, "HTTP_SEND_END")
        except Exception as error:
            if exchange.has_started:
                raise  # the server closes the connection, so that nothing looks complete
            status, body, refusal_headers = refusal_of(exchange, error)
            await exchange.reply_pieces(status, [body], JSON, refusal_headers)
        finally:
            if trace is not None:
                trace.finish()

    def fail(self, error: Exception) -> None:
        """Answer with the error."""
        refuse(self._exchange, error)


def refuse(exchange: Exchange, error: Exception) -> None:
    """Answer with an error, in Triton's status."""
    status, body, headers = refusal_of(exchange, error)
    exchange.answer(status, body, JSON, headers)


def _body_headers(json_length: int | None) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """Return the content type of a body whose first `json_length` bytes are JSON, None: all of it, and its header."""
    return (JSON, ()) if json_length is None else (BINARY, ((JSON_LENGTH_HEADER, b"%d" % json_length),))
