"""One request on its way through the guard, over ASGI or on a connection: its recording and its call."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from sluice.errors import SluiceError
from sluice.gateway.calls import Call
from sluice.gateway.front.http.access import find_place
from sluice.gateway.tenancy.access.identity import RouteGroup
from sluice.gateway.tracing.tracer import Tracer, finish_root
from sluice.record.spans import Attributes, Span
from sluice.record.timelines import RECEIVED
from sluice.serving.model import Model

RawHeaders = Sequence[tuple[bytes, bytes]]
CountResponse = Callable[[str, int], None]
"""Receives the path and the status of every answer."""

_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
_GENERATING_GROUPS = _GROUPS - {RouteGroup.EMBEDDINGS}
_FIRST_ERROR = 500
_MODELS = "/v2/models/"


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
        if self._tracer.is_exporting or not path.startswith(_MODELS):
            return True
        with suppress(SluiceError):  # the application says that there is no such model
            if any(map(self._tracer.records, self._find_versions(path.split("/")[3]))):
                return True
        return False


def _finish(root: Span, status: int | None, call: Call | None) -> None:
    """End the recording of a request with its status, None where its client got none."""
    if call is not None:
        if call.tenant:
            root.attributes["sluice.tenant"] = call.tenant
        if call.identity is not None:
            root.attributes["sluice.key"] = call.identity.name
    if status is not None:
        root.attributes["http.response.status_code"] = status
    finish_root(root, status, is_failure=status is not None and status >= _FIRST_ERROR)


class Passage:
    """A request with its recording and its call, as far as there are."""

    __slots__ = ("call", "headers", "method", "path", "peer", "request_id", "root", "status")

    def __init__(self, method: str, path: str, headers: RawHeaders, peer: str, request_id: str) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.peer = peer
        self.request_id = request_id
        self.call: Call | None = None
        self.root: Span | None = None
        self.status: int | None = None

    def receive(self, piece: bytes, *, is_last: bool) -> None:
        """Note a piece of the body."""
        if self.root is not None and is_last:
            self.root.note(RECEIVED)
        if self.call is not None:
            self.call.note_received(piece)

    def start(self, status: int) -> Iterable[tuple[bytes, bytes]]:
        """Note the beginning of the answer. Returns more headers of it."""
        self.status = status
        if self.root is not None:
            self.root.note("response_start")
        if self.call is None:
            return ()
        self.call.status = status
        return self.call.answer_headers()

    def send(self, piece: bytes) -> None:
        """Note a piece of the answer."""
        if self.call is not None:
            self.call.note_sent(piece)

    def end(self) -> None:
        """End the recording and the call. Idempotent."""
        root, call, self.root, self.call = self.root, self.call, None, None
        if root is not None:
            _finish(root, self.status, call)
        if call is not None:
            call.release()
