"""The infer route: the one request that most clients send, so everything here is short."""

import asyncio
from time import perf_counter_ns

from gateway.http.v2.body import BodyReader
from gateway.http.v2.compression import encoded
from gateway.http.v2.exchange import BINARY, JSON, Exchange
from gateway.http.v2.headers import STICKY, HeaderReader
from gateway.http.v2.infer_request import InferBody, header_length, read_infer_anywhere
from gateway.http.v2.infer_response import InferAnswer, infer_answer_anywhere
from gateway.http.v2.leaving import DisconnectWatches
from gateway.http.v2.target import Target
from gateway.v2.service import Service
from gateway.v2.trace import Trace
from serving.model import Model
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError

_HEADER_LENGTH = b"inference-header-content-length"


class InferRoute:
    """Answers POST …/infer."""

    def __init__(self, service: Service, body: BodyReader, headers: HeaderReader) -> None:
        self._service = service
        self._body = body
        self._headers = headers
        self._watches = DisconnectWatches()

    async def answer(self, exchange: Exchange, model: Model, target: Target) -> None:
        """Run one request on `model`, which `target` names.

        Raises SluiceError, and ClientDisconnect where nobody waits any more.
        """
        if model.spec.is_decoupled and model.streams_unasked:
            raise _only_for_streams()
        received_ns = perf_counter_ns()
        body = await self._body.read_decoded(exchange)
        length = exchange.headers.get(_HEADER_LENGTH)
        json_length = len(body) if length is None else header_length(length.decode("latin-1"), len(body))
        read = await read_infer_anywhere(body, json_length, model, self._service.shared_memory)
        if model.is_retired:  # while the body came in
            model = self._service.route(target.name, target.version_number, exchange.header(STICKY))
        self._headers.schedule(exchange, read.request)
        self._headers.forward(exchange, read.request)
        if model.spec.is_decoupled and model.is_decoupled_for(read.request):
            raise _only_for_streams()
        if model.spec.has_sequences:
            model = self._service.route_sequence(model, read.request, target.version_number, exchange.header(STICKY))
        trace = self._service.trace.begin(model, read.request)
        if trace is None:
            response = await self._run(exchange, model, read)
            await _send(exchange, await infer_answer_anywhere(model, response, read.plan))
        else:
            await self._answer_traced(exchange, model, read, trace, received_ns)

    async def _answer_traced(
        self, exchange: Exchange, model: Model, read: InferBody, trace: Trace, received_ns: int
    ) -> None:
        trace.capture("HTTP_RECV_START", received_ns)
        trace.capture("HTTP_RECV_END")
        try:
            response = await self._run(exchange, model, read, trace)
            trace.capture("INFER_RESPONSE_COMPLETE")
            trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
            answer = await infer_answer_anywhere(model, response, read.plan)
            trace.capture("HTTP_SEND_START")
            await _send(exchange, answer)
            trace.capture("HTTP_SEND_END")
        finally:
            trace.finish()

    async def _run(
        self, exchange: Exchange, model: Model, read: InferBody, trace: Trace | None = None
    ) -> InferResponse:
        """The model's one response. A client that leaves, or a task that is cancelled, cancels the job."""
        answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

        def receive(response: InferResponse) -> None:
            if not answered.done():
                answered.set_result(response)

        job = model.submit(read.request, receive)
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


async def _send(exchange: Exchange, answer: InferAnswer) -> None:
    body, json_length = answer
    accept = exchange.headers.get(b"accept-encoding")
    more: tuple[tuple[bytes, bytes], ...] = ()
    if accept is not None:
        body, more = await encoded(body, accept.decode("latin-1"))
    if json_length is None:
        await exchange.reply(200, body, JSON, more)
    else:
        await exchange.reply(200, body, BINARY, ((_HEADER_LENGTH, b"%d" % json_length), *more))
