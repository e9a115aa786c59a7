"""The infer route: the one request that most clients send, so everything here is short."""

import asyncio
from time import perf_counter_ns

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.http.v2.exchange import BINARY, JSON, Exchange, RequestTarget
from sluice.gateway.http.v2.infer_request import HttpInferRequest, parse_header_length, parse_infer_request
from sluice.gateway.http.v2.infer_response import InferBody, compress_body, encode_infer_response
from sluice.gateway.http.v2.request import JSON_LENGTH_HEADER, STICKY_HEADER, BodyReader, HeaderReader
from sluice.gateway.v2.server import V2Service
from sluice.gateway.v2.trace import Trace, following
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferResponse

_UNWATCHED_S = 0.02
"""Seconds before an answer's client is watched: for a shorter answer that costs more than it saves."""


class InferRoute:
    """Answers POST …/infer."""

    def __init__(self, service: V2Service, body: BodyReader, headers: HeaderReader) -> None:
        self._service = service
        self._body = body
        self._headers = headers
        self._watches = DisconnectWatches()

    async def answer(self, exchange: Exchange, model: Model, target: RequestTarget) -> None:
        """Run one request on `model`, which `target` names. Raises SluiceError, and ClientDisconnect."""
        if model.spec.is_decoupled and model.streams_unasked:
            raise _only_for_streams()
        received_ns = perf_counter_ns()
        body = await self._body.read_decoded(exchange)
        length = exchange.headers.get(JSON_LENGTH_HEADER)
        json_length = len(body) if length is None else parse_header_length(length.decode("latin-1"), len(body))
        parsed = await parse_infer_request(body, json_length, model, self._service.shared_memory)
        del body  # a model may run for long
        if model.is_retired:  # while the body came in
            model = self._service.route(target.name, target.version_number, exchange.header(STICKY_HEADER))
        self._headers.schedule(exchange, parsed.request)
        self._headers.forward(exchange, parsed.request)
        if model.spec.is_decoupled and model.is_decoupled_for(parsed.request):
            raise _only_for_streams()
        if model.spec.has_sequences:
            model = self._service.route_sequence(
                model, parsed.request, target.version_number, exchange.header(STICKY_HEADER)
            )
        trace = self._service.trace.begin(model, parsed.request)
        if trace is None:
            response = await self._run(exchange, model, parsed)
            await send_answer(exchange, await encode_infer_response(model, response, parsed.plan))
        else:
            await self._answer_traced(exchange, model, parsed, trace, received_ns)

    async def _answer_traced(
        self, exchange: Exchange, model: Model, parsed: HttpInferRequest, trace: Trace, received_ns: int
    ) -> None:
        trace.capture("HTTP_RECV_START", received_ns)
        trace.capture("HTTP_RECV_END")
        try:
            response = await self._run(exchange, model, parsed, trace)
            trace.capture("INFER_RESPONSE_COMPLETE")
            trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
            answer = await encode_infer_response(model, response, parsed.plan)
            trace.capture("HTTP_SEND_START")
            await send_answer(exchange, answer)
            trace.capture("HTTP_SEND_END")
        finally:
            trace.finish()

    async def _run(
        self, exchange: Exchange, model: Model, parsed: HttpInferRequest, trace: Trace | None = None
    ) -> InferResponse:
        """Return the model's one response. The client's disconnect and this task's cancellation cancel the job."""
        answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

        def receive(response: InferResponse) -> None:
            if not answered.done():
                answered.set_result(response)

        with following(trace):
            job = model.submit(parsed.request, receive)
        if not answered.done():
            watch = self._watches.begin(exchange.receive, job, answered)
            try:
                await answered
            except asyncio.CancelledError:
                job.cancel()
                raise
            finally:
                watch.end()
        if trace is not None:
            trace.capture_job(job)
        response = answered.result()
        if response.error is not None:
            raise response.error
        return response


def _only_for_streams() -> SluiceError:
    text = "HTTP end point doesn't support models with decoupled transaction policy"
    return SluiceError(ErrorCode.UNIMPLEMENTED, text)


async def send_answer(exchange: Exchange, answer: InferBody) -> None:
    """Send an answer, compressed as the client accepts it."""
    pieces, json_length = answer
    accept = exchange.headers.get(b"accept-encoding")
    more: tuple[tuple[bytes, bytes], ...] = ()
    if accept is not None:
        pieces, more = await compress_body(pieces, accept.decode("latin-1"))
    content_type, own = body_headers(json_length)
    await exchange.reply_pieces(200, pieces, content_type, (*own, *more))


def body_headers(json_length: int | None) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    """Return the content type of a body whose first `json_length` bytes are JSON, None: all of it, and its header."""
    return (JSON, ()) if json_length is None else (BINARY, ((JSON_LENGTH_HEADER, b"%d" % json_length),))


class DisconnectWatches:
    """Watches the clients of slow answers. There is one timer for all: one each would cost as much as an answer."""

    def __init__(self) -> None:
        self._waiting: dict[DisconnectWatch, float] = {}
        self._is_timer_running = False

    def begin(self, receive: Receive, job: InferJob, answered: "asyncio.Future[InferResponse]") -> "DisconnectWatch":
        """Watch after _UNWATCHED_S. The request's body must have been read. `end` the watch when there is an answer."""
        loop = answered.get_loop()
        watch = DisconnectWatch(receive, job, answered, self._waiting)
        self._waiting[watch] = loop.time()
        if not self._is_timer_running:
            self._is_timer_running = True
            loop.call_later(_UNWATCHED_S, self._start_due, loop)
        return watch

    def _start_due(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() - _UNWATCHED_S
        for watch in [watch for watch, since in self._waiting.items() if since <= due]:
            del self._waiting[watch]
            watch.begin()
        self._is_timer_running = bool(self._waiting)
        if self._is_timer_running:
            loop.call_later(_UNWATCHED_S, self._start_due, loop)


class DisconnectWatch:
    """Watches the client of one answer: its disconnect cancels the job."""

    __slots__ = ("_answered", "_job", "_receive", "_task", "_waiting")

    def __init__(
        self,
        receive: Receive,
        job: InferJob,
        answered: "asyncio.Future[InferResponse]",
        waiting: "dict[DisconnectWatch, float]",
    ) -> None:
        self._receive = receive
        self._job = job
        self._answered = answered
        self._waiting = waiting
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="disconnect-watch")

    def end(self) -> None:
        """Stop watching: there is an answer, or the request was cancelled."""
        self._waiting.pop(self, None)
        task, self._task = self._task, None  # task and watch would hold each other until a collection
        if task is not None:
            task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._job.cancel()
        if not self._answered.done():
            self._answered.set_exception(ClientDisconnect())
