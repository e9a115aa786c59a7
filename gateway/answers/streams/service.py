"""Requests that are answered apart from their connections: begun, found again, shared and cancelled."""

import asyncio
import time
from hashlib import sha256
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.streams.kept import End, Head, HeaderPairs, KeptStream, Origin, Pieces, Tokens
from sluice.gateway.answers.streams.store import IdempotencyKey, SharedStore, StreamLimits, StreamStore, make_stream_id
from sluice.gateway.answers.streams.wishes import KEY_HEADER, RESUME_HEADER, Wish
from sluice.gateway.calls import Call, current_call, hold_call
from sluice.gateway.front.http.access import find_place
from sluice.gateway.front.http.errors import as_sluice_error, error_response
from sluice.gateway.front.http.request import DETACHED, owner_of
from sluice.gateway.options.streams import ResumeOptions
from sluice.gateway.telemetry.logs import current_request_id
from sluice.pipelines.llm.tape import Tape, current_tape
from sluice.pipelines.text.types import OWNER_KEY_HEADER
from sluice.repetition import Repetition, current_repetition

if TYPE_CHECKING:
    from sluice.gateway.answers.streams.shared import Recorded

_SECRETS = frozenset({b"authorization", b"x-api-key", OWNER_KEY_HEADER.encode()})
"""Headers that are not kept: whoever comes back to a stream sends them again."""
_PREFIX, _OTHERS = b"x-sluice-", frozenset({b"content-type", b"content-length"})
"""Headers that are kept, besides secrets: those that routes read."""
_OFF = "this server keeps no streams (--stream-resume-secs)"
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

    def _begin(self, status: int, headers: HeaderPairs) -> None:
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


class _Reader(NamedTuple):
    """A request that reads a stream: who sent it, and what a request of its sender looks like."""

    scope: Scope
    call: Call | None


class ConflictingKeyError(SluiceError):
    """An idempotency key has come with another request before."""


class StreamService:
    """The kept streams of one server, over the application that answers them. Belongs to the event loop."""

    def __init__(self, options: ResumeOptions) -> None:
        """With a Redis in `options` it is to be made on the event loop."""
        self.options = options
        self.app: ASGIApp
        """The application that answers, within the guards; its middleware sets it."""
        limits = StreamLimits(options.max_bytes, options.max_count, options.max_stream_bytes)
        self.store = StreamStore(limits)
        if options.is_shared:
            self.store.shared = self._open_shared(limits)
        self._opening: WeakValueDictionary[IdempotencyKey, asyncio.Lock] = WeakValueDictionary()
        self._readers: WeakKeyDictionary[KeptStream, _Reader] = WeakKeyDictionary()
        """The last reader of each stream of another gateway."""

    def _open_shared(self, limits: StreamLimits) -> SharedStore:
        from sluice.gateway.answers.streams.shared import SharedStreams  # few servers need Redis' client

        return SharedStreams(self.options.store, self.store, limits, self._rescue)

    # --- coming back ---

    async def find(self, owner: str, stream_id: str, scope: Scope) -> KeptStream:
        """Return the owner's stream for the request of `scope`. Raises NOT_FOUND, and INVALID where no streams are
        kept."""
        self.need_resumption("last-event-id")
        found = self.store.find(owner, stream_id) or await self._find_shared(owner, stream_id)
        if found is not None:
            self._note_reader(found, scope)
        self.store.counts["resumption", "missing" if found is None else "resumed"] += 1
        if found is None:
            message = f"stream {stream_id!r} not found: it was never made resumable, has expired or is another owner's"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="stream_id")
        return found

    async def _find_shared(self, owner: str, stream_id: str) -> KeptStream | None:
        return None if self.store.shared is None else await self.store.shared.find(owner, stream_id)

    def need_resumption(self, header: str) -> None:
        """Raise INVALID, naming the `header` that asks for it, where no streams are kept."""
        if not self.options.resume_s:
            raise invalid(header, f"{header} cannot be used: {_OFF}")

    async def cancel(self, owner: str, stream_id: str, scope: Scope) -> None:
        """Cancel the owner's stream, and keep it no longer. Raises as `find`."""
        kept = await self.find(owner, stream_id, scope)
        if self.store.shared is not None:
            await self.store.shared.drop(stream_id)
        self.store.drop(kept)

    # --- beginning ---

    async def open(self, wish: Wish, scope: Scope, body: bytes) -> tuple[KeptStream, bool]:
        """Return the stream of a request, and whether another request with its key began it.

        Raises INVALID where no streams are kept, OVERLOADED where too many are, and ConflictingKeyError for a key that
        came with another request.
        """
        if wish.is_resumable:
            self.need_resumption(RESUME_HEADER)
        owner = owner_of(Headers(scope=scope))
        key = IdempotencyKey(owner, wish.key) if wish.key else None
        origin = self._describe(wish, owner, scope, body)
        if key is None:
            return await self._begin(origin, None, scope), False
        async with self._opening.setdefault(key, asyncio.Lock()):
            earlier = self.store.find_by_key(key)
            kept = earlier or await self._begin(origin, key, scope)
        if kept.id != origin.stream_id:
            self._check_same(kept, key.key, origin.fingerprint)
            self._note_reader(kept, scope)
        return kept, kept.id != origin.stream_id

    def _note_reader(self, kept: KeptStream, scope: Scope) -> None:
        """Remember who reads a stream of another gateway: it may have to go on here, as a request of his."""
        if self.store.shared is not None and kept.task is None and not kept.has_ended:
            self._readers[kept] = _Reader(detached_scope(scope), current_call.get())

    async def _begin(self, origin: Origin, key: IdempotencyKey | None, scope: Scope) -> KeptStream:
        """Begin to answer; return the answer of another gateway instead where that has one for the key."""
        kept = self.store.add(origin, key)
        if self.store.shared is not None:
            earlier = await self.store.shared.begin(kept, key)
            found = await self.store.shared.find(origin.owner, earlier) if earlier else None
            if found is not None:
                self.store.drop(kept)
                return found
        run = DetachedRun(self.app, kept)
        kept.task = asyncio.create_task(self._run(run, kept, detached_scope(scope)), name=f"stream {kept.id}")
        return kept

    async def _run(self, run: DetachedRun, kept: KeptStream, scope: Scope, recorded: "Recorded | None" = None) -> None:
        """Run in a task of its own. What another gateway may go on with is drawn and made so that it can."""
        if self.store.shared is not None:
            current_repetition.set(Repetition(kept.id))
            current_tape.set(Tape(lambda number, event: kept.publish(Tokens(number, event)), recorded or ()))
        await run(scope)

    async def _rescue(self, kept: KeptStream, recorded: "Recorded") -> None:
        """Go on with a stream whose gateway is gone, for those who read it here, as a request of theirs."""
        if kept not in self._readers:
            message = "the gateway of this stream is gone, and no request can go on with it"
            kept.failure = SluiceError(ErrorCode.UNAVAILABLE, message)
            kept.publish(End(False))
            return
        kept.task = asyncio.create_task(self._run_rescued(kept, recorded), name=f"stream {kept.id}")

    async def _run_rescued(self, kept: KeptStream, recorded: "Recorded") -> None:
        reader, origin = self._readers[kept], kept.origin
        current_request_id.set(origin.request_id)
        call = None if reader.call is None else reader.call.sibling(origin.request_id)
        try:
            if call is not None:
                call.operation, call.group = origin.path, find_place(origin.path).group
                current_call.set(call)
                await call.begin()
            run = DetachedRun(self.app, kept, len(kept.log))
            await self._run(run, kept, _scope_of(origin, reader.scope), recorded)
        except SluiceError as refusal:
            kept.failure = refusal
            kept.publish(End(False))
        finally:
            if call is not None:
                call.release()

    def _describe(self, wish: Wish, owner: str, scope: Scope, body: bytes) -> Origin:
        """Return what is kept of a request."""
        times = (self.options.resume_s if wish.is_resumable else 0.0, self.options.idempotency_s if wish.key else 0.0)
        return Origin(
            stream_id=make_stream_id(),
            owner=owner,
            request_id=scope["state"]["request_id"],
            path=scope["path"],
            query=scope.get("query_string", b""),
            headers=[pair for pair in scope["headers"] if _is_kept(pair[0])],
            body=body,
            is_resumable=wish.is_resumable,
            keep_s=max(times),
            began_at=time.time(),
            fingerprint=_fingerprint(scope, body) if wish.key else "",
        )

    def _check_same(self, earlier: KeptStream, key: str, fingerprint: str) -> None:
        """Count a replay. Raises ConflictingKeyError where it is of another request."""
        if earlier.origin.fingerprint != fingerprint:
            self.store.counts["replay", "conflict"] += 1
            message = f"{KEY_HEADER} {key!r} came with another request before: a retry must have the same path and body"
            raise ConflictingKeyError(ErrorCode.INVALID, message, param=KEY_HEADER)
        self.store.counts["replay", "replayed" if earlier.has_ended else "shared"] += 1

    async def close(self) -> None:
        """Cancel what is under way; what is shared is left to the other gateways."""
        if self.store.shared is not None:
            await self.store.shared.close()
        await self.store.close()


def _is_kept(header: bytes) -> bool:
    return (header.startswith(_PREFIX) or header in _OTHERS) and header not in _SECRETS


def _scope_of(origin: Origin, reader: Scope) -> Scope:
    """Return the scope of the request that a stream answers, as if the sender of another one had sent it again."""
    secrets = [pair for pair in reader["headers"] if pair[0] in _SECRETS]
    changes = {"method": "POST", "path": origin.path, "raw_path": origin.path.encode(), "path_params": {}}
    changes |= {"query_string": origin.query, "headers": [*origin.headers, *secrets]}
    scope = detached_scope(reader, **changes)
    scope["state"]["request_id"] = origin.request_id
    return scope


def _fingerprint(scope: Scope, body: bytes) -> str:
    """Return what a request has in common with its retries, and with no other request."""
    found = sha256()
    for part in (scope["path"].encode(), scope.get("query_string", b""), body):
        found.update(len(part).to_bytes(8) + part)
    return found.hexdigest()
