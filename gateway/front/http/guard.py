"""The guard before every route, over ASGI and on a connection alike: ids, counts, pages, keys, quotas, restrictions,
traces."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.calls import BATCH, Call, CallLog
from sluice.gateway.front.http.access import (
    PageGuard,
    count_writer,
    find_place,
    find_restriction,
    is_open,
    read_credentials,
)
from sluice.gateway.front.http.errors import as_sluice_error, error_response, is_anthropic
from sluice.gateway.front.http.exchange import (
    ConnectionExchange,
    CountResponse,
    HotRoutes,
    Passage,
    RawHeaders,
)
from sluice.gateway.front.http.request import choose_request_id, find_parent
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.telemetry.logs import current_request_id
from sluice.gateway.telemetry.tracer import Tracer
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.record.spans import Attributes, Span, current_span, remote_parent
from sluice.serving.model import Model

_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
_GENERATING_GROUPS = _GROUPS - {RouteGroup.EMBEDDINGS}
_V2_MODELS = "/v2/models/"
_ID_HEADER, _ANTHROPIC_ID_HEADER = b"x-request-id", b"request-id"
"""The headers of the id of a request; Anthropic's clients read the second."""
_METHOD = "POST"
"""The method of hot routes."""
_MODELS = "/v1/models"
"""The path that Anthropic's clients have in common with OpenAI's."""


class RequestTracing:
    """Records the requests that make models work: without a collector of traces those alone that may make a language
    model generate."""

    def __init__(self, tracer: Tracer, find_versions: Callable[[str], Sequence[Model]]) -> None:
        """`find_versions` returns the loaded versions of a model."""
        self._tracer = tracer
        self._find_versions = find_versions
        self._groups = _GROUPS if tracer.is_exporting else _GENERATING_GROUPS

    def open(self, method: str, path: str, peer: str, request_id: str) -> Span | None:
        """Begin the recording of a request, and make its root the current span; None where it is not recorded."""
        if method != "POST" or find_place(path).group not in self._groups or not self._may_record(path):
            return None
        attributes: Attributes = {"http.request.method": method, "url.path": path}
        if peer:
            attributes["client.address"] = peer
        return self._tracer.open(f"{method} {path}", request_id, attributes)

    def _may_record(self, path: str) -> bool:
        if self._tracer.is_exporting or not path.startswith(_V2_MODELS):
            return True
        with suppress(SluiceError):  # the application says that there is no such model
            if any(map(self._tracer.records, self._find_versions(path.split("/")[3]))):
                return True
        return False


class Guard:
    """Decides who may ask what, and has each request recorded, counted and charged."""

    def __init__(
        self,
        calls: CallLog,
        count_response: CountResponse,
        find_protocol: Callable[[str], str],
        pages: PageGuard | None = None,
        restrictions: Restrictions | None = None,
        tracing: RequestTracing | None = None,
    ) -> None:
        """`find_protocol` returns a path's protocol. `tracing` None: nobody records requests."""
        self.calls = calls
        self.count_response = count_response
        self.tracing = tracing
        self._find_protocol = find_protocol
        self.pages = pages or PageGuard(calls)
        self._restrictions = restrictions or None

    def open(self, passage: Passage) -> None:
        """Make a request the current one of its context, and begin its recording."""
        current_request_id.set(passage.request_id)
        remote_parent.set(find_parent(passage.headers))
        if self.tracing is not None:
            passage.root = self.tracing.open(passage.method, passage.path, passage.peer, passage.request_id)

    def find_restriction(self, path: str, headers: RawHeaders) -> SluiceError | None:
        """Return which restriction refuses a request; None where none does."""
        return None if self._restrictions is None else find_restriction(self._restrictions, path, headers)

    async def begin_call(self, passage: Passage) -> None:
        """Begin the call of a client's request, unless nobody observes calls. Raises SluiceError for a refusal."""
        path = passage.path
        if not self.calls.is_active or is_open(path):
            return
        call, group = self._open_call(passage, self._find_protocol(path))
        await self.calls.identify(call, read_credentials(path, passage.headers, passage.peer), group)
        await call.begin()

    async def begin_own_call(self, passage: Passage, sender: Identity | None, tenant: str) -> None:
        """Begin the call of a request that the server makes for a `sender`, None where nobody was asked for a key.

        The sender was admitted before, so only its rights are looked at again. Raises as `begin_call`.
        """
        if self.calls.is_active:
            call, group = self._open_call(passage, BATCH)
            call.identity, call.tenant = self.calls.access.resume(sender, group), tenant
            await call.begin()

    def _open_call(self, passage: Passage, protocol: str) -> tuple[Call, RouteGroup | None]:
        path, group = passage.path, find_place(passage.path).group
        is_observed = group is not RouteGroup.METRICS
        call = passage.call = self.calls.open(protocol, path, passage.request_id, is_observed=is_observed)
        call.group = group if passage.method == "POST" else None
        return call, group


class GuardMiddleware:
    """The guard before an ASGI application. It also answers exceptions that nobody expected: Starlette's own place for
    that would log each trace twice.

    A request takes the client's `x-request-id` or gets one, which comes back with the answer. What is refused gets 401
    or 403 in its protocol's own shape.
    """

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client, headers, path = scope.get("client"), scope["headers"], scope["path"]
        request_id = choose_request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        passage = Passage(scope["method"], path, headers, client[0] if client else "", request_id)
        self._guard.open(passage)
        ids = _id_headers(path, request_id)
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *passage.start(status), *ids]
                self._guard.count_response(path, status)
            else:
                passage.send(message.get("body", b""))
            await send(message)

        async def receive_noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                passage.receive(message.get("body", b""), is_last=not message.get("more_body", False))
            return message

        try:
            refusal = await self._find_refusal(passage, scope)
            app = self._app if refusal is None else error_response(path, refusal)
            is_noted = passage.call is not None or passage.root is not None
            await app(scope, receive_noted if is_noted else receive, send_noted)
        except Exception as error:
            if has_started:
                raise  # the server closes the connection, so that nothing looks complete
            await error_response(path, as_sluice_error(error, request_id))(scope, receive, send_noted)
        finally:
            passage.end()
            if self._guard.tracing is not None:
                current_span.set(None)

    async def _find_refusal(self, passage: Passage, scope: Scope) -> SluiceError | None:
        guard = self._guard
        refusal = guard.pages.find_refusal(passage.method, dict(passage.headers), passage.peer)
        if refusal is not None:
            return refusal
        try:
            await guard.begin_call(passage)
        except SluiceError as error:
            return error
        if passage.call is not None:
            count_writer(passage.send, scope.get("extensions", {}))
        return guard.find_restriction(passage.path, passage.headers)


def _id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    encoded = request_id.encode("ascii")
    ids = [(_ID_HEADER, encoded)]
    if is_anthropic(path) or path.startswith(_MODELS):
        ids.append((_ANTHROPIC_ID_HEADER, encoded))
    return ids


class GuardedRoutes:
    """The guard before hot routes. Requests that nobody observes need no context of their own."""

    def __init__(self, inner: HotRoutes, guard: Guard, *, takes_pages: bool = True) -> None:
        """Without `takes_pages` what web pages ask is left to the application, which tells browsers what they may
        read."""
        self._inner = inner
        self._guard = guard
        self.routes = HotRoutes(inner.takes if takes_pages else self._takes_others, self._open)

    def _takes_others(self, url: bytes, headers: RawHeaders) -> bool:
        return self._inner.takes(url, headers) and all(name != b"origin" for name, _ in headers)

    def _open(self, exchange: ConnectionExchange) -> None:
        guard, headers = self._guard, exchange.raw_headers
        exchange.request_id = request_id = choose_request_id(headers)
        exchange.count_response = guard.count_response
        if guard.calls.is_active or guard.tracing is not None or b"traceparent" in exchange.headers:
            exchange.passage = passage = Passage(_METHOD, exchange.path, headers, exchange.peer, request_id)
            copy_context().run(self._begin_observed, exchange, passage)
            return
        before = current_request_id.set(request_id)
        try:
            self._begin_allowed(exchange, guard.pages.find_refusal(_METHOD, exchange.headers, exchange.peer))
        finally:
            current_request_id.reset(before)

    def _begin_observed(self, exchange: ConnectionExchange, passage: Passage) -> None:
        guard = self._guard
        guard.open(passage)
        refusal = guard.pages.find_refusal(_METHOD, exchange.headers, passage.peer)
        if refusal is None and guard.calls.is_active:
            exchange.go_on(self._begin_call(exchange, passage))
        else:
            self._begin_allowed(exchange, refusal)

    async def _begin_call(self, exchange: ConnectionExchange, passage: Passage) -> None:
        refusal: SluiceError | None = None
        try:
            await self._guard.begin_call(passage)
        except Exception as error:
            refusal = as_sluice_error(error, exchange.request_id)
        if not exchange.is_gone:
            self._begin_allowed(exchange, refusal)

    def _begin_allowed(self, exchange: ConnectionExchange, refusal: SluiceError | None) -> None:
        """Answer, unless there is a refusal or a restriction has one."""
        refusal = refusal or self._guard.find_restriction(exchange.path, exchange.raw_headers)
        if refusal is not None:
            response = error_response(exchange.path, refusal)
            own = (b"content-type", b"content-length")
            more = [(name, value) for name, value in response.raw_headers if name not in own]
            exchange.answer(response.status_code, bytes(response.body), more=more)
            return
        if exchange.passage is not None and exchange.body is not None:
            exchange.passage.receive(exchange.body, is_last=True)
        self._inner.begin(exchange)
