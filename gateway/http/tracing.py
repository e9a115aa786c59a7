"""Records requests over HTTP: the roots of traces and timelines."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.access.identity import RouteGroup
from sluice.gateway.calls import current_call
from sluice.gateway.http.access import find_place
from sluice.gateway.tracing.timelines import RECEIVED
from sluice.gateway.tracing.tracer import Tracer, finish_root, read_parent, remote_parent
from sluice.serving.model import Model
from sluice.spans import Attributes, Span, current_span

_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
_GENERATING_GROUPS = _GROUPS - {RouteGroup.EMBEDDINGS}
_FIRST_ERROR = 500
_MODELS = "/v2/models/"


class TraceMiddleware:
    """Records the requests that make models work, from their head to the end of their answer: without a collector of
    traces those alone that may make a language model generate."""

    def __init__(self, app: ASGIApp, tracer: Tracer, find_versions: Callable[[str], Sequence[Model]]) -> None:
        """`find_versions` returns the loaded versions of a model."""
        self._app = app
        self._tracer = tracer
        self._find_versions = find_versions
        self._groups = _GROUPS if tracer.is_exporting else _GENERATING_GROUPS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = self._open(scope) if self._is_recorded(scope) else None
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

    def _is_recorded(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST" or find_place(scope["path"]).group not in self._groups:
            return False
        if self._tracer.is_exporting or not scope["path"].startswith(_MODELS):
            return True
        with suppress(SluiceError):  # the application says that there is no such model
            if any(map(self._tracer.records, self._find_versions(scope["path"].split("/")[3]))):
                return True
        if self._tracer.reads_parents:
            remote_parent.set(read_parent(partial(_find_header, scope["headers"])))
        return False

    def _open(self, scope: Scope) -> Span | None:
        path, client = scope["path"], scope.get("client")
        attributes: Attributes = {"http.request.method": scope["method"], "url.path": path}
        if client:
            attributes["client.address"] = client[0]
        name, request_id = f"{scope['method']} {path}", scope["state"]["request_id"]
        return self._tracer.open(name, request_id, attributes, read_parent(partial(_find_header, scope["headers"])))


def _find_header(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    sought = name.encode()
    return next((value.decode("latin-1") for key, value in headers if key == sought), None)


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
