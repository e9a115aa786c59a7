"""Infer requests that are answered on their connection: plain ones, to models that give one response.

What is in any way special is declined, before anything was done, and answered by `InferRoute`: sequences, streams,
traces, forwarded headers, scheduling headers, encoded or long bodies, and requests that cannot be read.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.http.direct import DirectExchange
from sluice.gateway.http.errors import as_sluice_error
from sluice.gateway.http.v2.exchange import (
    JSON,
    V2_STATUS,
    Exchange,
    RequestTarget,
    error_json,
    raw_error_headers,
    reply_error,
)
from sluice.gateway.http.v2.infer import body_headers, send_answer
from sluice.gateway.http.v2.infer_request import HttpInferRequest, parse_at_once, parse_header_length, takes_long
from sluice.gateway.http.v2.infer_response import (
    INLINE_BYTES as INLINE_ANSWER_BYTES,
)
from sluice.gateway.http.v2.infer_response import (
    InferBody,
    OutputPlan,
    compress_short,
    encode_infer_response,
    encode_short_response,
    is_short,
)
from sluice.gateway.http.v2.plain_request import parse_plain_request
from sluice.gateway.http.v2.request import JSON_LENGTH_HEADER, HeaderReader
from sluice.gateway.long_work import has_short_inputs
from sluice.gateway.v2.server import V2Service
from sluice.serving.model import Model
from sluice.serving.request import InferResponse

log = logging.getLogger("sluice.gateway.http.v2.app")
_PREFIX, _ACTION = b"/v2/models/", b"/infer"
FindTarget = Callable[[str], RequestTarget | None]


class DirectInfer:
    """Answers plain infer requests."""

    def __init__(self, service: V2Service, limit_bytes: int, headers: HeaderReader, find: FindTarget) -> None:
        """`limit_bytes` is that of bodies. `find` returns what the path of an infer route names."""
        self._service = service
        self._limit_bytes = limit_bytes
        self._headers = headers
        self._find = find
        self._unexpected: set[type[Exception]] = set()
        """The kinds of errors that the log has: a fault that every request meets fills no disk."""

    def takes(self, url: bytes) -> bool:
        """Whether `url` may be that of an infer route."""
        is_plain = b"%" not in url and b"?" not in url and url.isascii()
        return is_plain and url.endswith(_ACTION) and url.startswith(_PREFIX)

    def begin(self, exchange: DirectExchange) -> bool:
        """Submit the request, whose answer follows; False where it needs the application."""
        headers = exchange.headers
        if b"content-encoding" in headers or b"transfer-encoding" in headers or len(exchange.body) > self._limit_bytes:
            return False
        if self._service.trace.is_on or not self._headers.are_plain(headers):
            return False
        try:
            return self._submit(exchange)
        except SluiceError:  # of a request that cannot be read: the application says why
            return False
        except Exception as error:  # ours: the application may answer, and nobody would notice the fault
            self._note(exchange, error)
            return False

    def _note(self, exchange: DirectExchange, error: Exception) -> None:
        if type(error) not in self._unexpected:
            self._unexpected.add(type(error))
            text = (
                "POST %s met an unexpected %s and was left to the application; the log has only the first of its kind"
            )
            log.error(text, exchange.path, type(error).__name__, exc_info=error)

    def _submit(self, exchange: DirectExchange) -> bool:
        target = self._find(exchange.path)
        if target is None:
            return False
        model = self._service.route(target.name, target.version_number)
        if model.spec.is_decoupled or model.spec.has_sequences:
            return False
        body, length = exchange.body, exchange.headers.get(JSON_LENGTH_HEADER)
        json_length = len(body) if length is None else parse_header_length(length.decode("latin-1"), len(body))
        parsed = self._parse(body, json_length, model)
        if parsed is None:
            return False
        log.debug("HTTP request: POST %s", exchange.path)
        answer = _Answer(exchange, model, parsed.plan)
        try:
            job = model.submit(parsed.request, answer.receive)
        except Exception as error:
            answer.refuse(error)
        else:
            if not job.is_finished:
                exchange.on_disconnect = job.cancel
        return True

    def _parse(self, body: bytes, json_length: int, model: Model) -> HttpInferRequest | None:
        """Return the request; None where it is long. Raises SluiceError."""
        if takes_long(body, json_length):
            return None
        parsed = parse_plain_request(body, json_length, model.name) if json_length else None
        if parsed is None:
            parsed = parse_at_once(body, json_length, model, self._service.shared_memory)
        return parsed if has_short_inputs(parsed.request) else None


class _Answer:
    """The answer to one request, written when the model has responded."""

    __slots__ = ("_exchange", "_model", "_plan")

    def __init__(self, exchange: DirectExchange, model: Model, plan: OutputPlan) -> None:
        self._exchange = exchange
        self._model = model
        self._plan = plan

    def receive(self, response: InferResponse) -> None:
        """Write the answer, or leave it to a task where that takes long."""
        if response.error is not None:
            self.refuse(response.error)
            return
        try:
            if not is_short(response, self._plan):
                self._go_on(partial(encode_infer_response, self._model, response, self._plan))
                return
            self._reply(encode_short_response(self._model, response, self._plan))
        except Exception as error:
            self.refuse(error)

    def _reply(self, answer: InferBody) -> None:
        pieces, json_length = answer
        if sum(map(len, pieces)) >= INLINE_ANSWER_BYTES:
            self._go_on(partial(_known, answer))
            return
        content_type, headers = body_headers(json_length)
        accept = self._exchange.headers.get(b"accept-encoding")
        if accept:
            pieces, more = compress_short(pieces, accept.decode("latin-1"))
            headers += more
        self._exchange.reply(200, bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces), content_type, headers)

    def _go_on(self, encode: Callable[[], Awaitable[InferBody]]) -> None:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send)
            try:
                await send_answer(exchange, await encode())
            except Exception as error:
                if exchange.has_started:
                    raise  # the server closes the connection, so that nothing looks complete
                await reply_error(exchange, as_sluice_error(error, exchange.request_id))

        self._exchange.go_on(answer)

    def refuse(self, error: Exception) -> None:
        """Answer with the error."""
        exchange = self._exchange
        refusal = as_sluice_error(error, exchange.request_id or "-")
        error.__traceback__ = None  # its frames hold the job, which would hold the error
        headers = raw_error_headers(refusal)
        exchange.reply(V2_STATUS[refusal.code], error_json(refusal), JSON, headers)


async def _known(answer: InferBody) -> InferBody:
    return answer
