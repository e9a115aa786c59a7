"""Records requests over HTTP: the roots of traces and timelines."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.identity import RouteGroup
from gateway.calls import current_call
from gateway.http.access import find_place
from gateway.tracing.timelines import RECEIVED
from gateway.tracing.tracer import Tracer, finish_root, read_parent
from sluice.spans import Attributes, Span, current_span

_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
_FIRST_ERROR = 500


class TraceMiddleware:
    """Records the requests that make models work, from their head to the end of their answer."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = scope["type"] == "http" and scope["method"] == "POST" and find_place(scope["path"]).group in _GROUPS
        root = self._open(scope) if is_work else None
        if root is None:
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def noting_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                root.note(RECEIVED)
            return message

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                root.note("response_start")
            await send(message)

        try:
            await self._app(scope, noting_receive, noting_send)
        finally:
            _finish(root, status)
            current_span.set(None)

    def _open(self, scope: Scope) -> Span | None:
        headers = scope["headers"]

        def find_header(name: str) -> str | None:
            sought = name.encode()
            return next((value.decode("latin-1") for key, value in headers if key == sought), None)

        path, client = scope["path"], scope.get("client")
        attributes: Attributes = {"http.request.method": scope["method"], "url.path": path}
        if client:
            attributes["client.address"] = client[0]
        name, request_id = f"{scope['method']} {path}", scope["state"]["request_id"]
        return self._tracer.open(name, request_id, attributes, read_parent(find_header))


def _finish(root: Span, status: int | None) -> None:
    call = current_call.get()
    if call is not None:
        if call.tenant:
            root.attributes["sluice.tenant"] = call.tenant
        if call.identity is not None:
            root.attributes["sluice.key"] = call.identity.name
    if status is not None:
        root.attributes["http.response.status_code"] = status
    finish_root(root, status, is_failure=status is not None and status >= _FIRST_ERROR)
