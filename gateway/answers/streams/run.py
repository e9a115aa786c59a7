"""Answers a request apart from its client's connection: what it answers goes to a kept stream."""

from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from sluice.errors import SluiceError
from sluice.gateway.answers.streams.kept import End, Head, Headers, KeptStream, Pieces
from sluice.gateway.calls import hold_call
from sluice.gateway.front.http.errors import as_sluice_error, error_response
from sluice.gateway.front.http.request import DETACHED

_EVENT_END = b"\n\n"


class DetachedRun:
    """One run of the application for a kept stream. Its client is there until nobody wants the stream any more."""

    def __init__(self, app: ASGIApp, kept: KeptStream, num_known: int = 0) -> None:
        """The first `num_known` pieces of the answer are in the stream already, with its head."""
        self.began_at = kept.origin.began_at
        self._app = app
        self._kept = kept
        self._num_known = num_known
        self._num_made = 0
        self._has_begun = self._is_events = self._is_done = False
        self._has_failed = False
        self._pending = [kept.origin.body]

    async def __call__(self, scope: Scope) -> None:
        """Answer the request of `scope`, which becomes the run's own."""
        kept = self._kept
        scope[DETACHED] = self
        try:
            with hold_call():
                await self._app(scope, self._receive, self._send)
            self._is_done = True
        except Exception as error:
            self._has_failed = True
            failure = as_sluice_error(error, kept.origin.request_id)
            if self._has_begun:
                kept.failure = failure
            else:
                await error_response(kept.origin.path, failure)(scope, self._receive, self._send)
        finally:
            kept.publish(End(self._is_done and not self._has_failed and not kept.gone.is_set()))
            kept.task = None

    def note_failure(self, error: SluiceError) -> None:
        self._has_failed = True

    async def _receive(self) -> Message:
        if self._pending:
            return {"type": "http.request", "body": self._pending.pop(), "more_body": False}
        await self._kept.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message["status"], list(message.get("headers", ())))
        elif piece := message.get("body", b""):
            self._add(split_events(piece) if self._is_events else [piece])

    def _begin(self, status: int, headers: Headers) -> None:
        self._has_begun = True
        head = Head(status, headers)
        self._is_events = head.is_event_stream
        self._has_failed |= status >= HTTPStatus.BAD_REQUEST
        if self._kept.head is None:
            self._kept.publish(head)

    def _add(self, pieces: list[bytes]) -> None:
        """Publish the pieces that are not known yet, each of them with its id where they are events."""
        first, self._num_made = self._num_made, self._num_made + len(pieces)
        if self._num_made <= self._num_known:
            return
        skipped = max(0, self._num_known - first)
        if self._is_events and self._kept.origin.is_resumable:
            name = self._kept.event_prefix.encode()
            pieces = [b"id: %b:%d\n%b" % (name, first + 1 + i, piece) for i, piece in enumerate(pieces)]
        self._kept.publish(Pieces(pieces[skipped:]))


def split_events(frames: bytes) -> list[bytes]:
    """Return the events of which `frames` consists, each with its blank line."""
    if frames.count(_EVENT_END) == 1:
        return [frames]
    return [event + _EVENT_END for event in frames.split(_EVENT_END) if event]


def detached_scope(scope: Scope, **changes: Any) -> Scope:
    """Return a copy of a request's scope for a run that outlives the request."""
    return {**scope, "state": dict(scope["state"]), "extensions": {}, **changes}
