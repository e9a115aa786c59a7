"""Responses that are generated in the background: their tasks, and the events that clients may follow."""

import asyncio
import logging
import time
from contextlib import AbstractContextManager, nullcontext

import orjson

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import End, KeptStream, Origin, Pieces
from sluice.gateway.answers.streams.store import StreamStore
from sluice.gateway.api.openai.responses.archive import FINAL, LEASE_S, Archive, StoredResponse, encode_items
from sluice.gateway.api.openai.responses.items import JsonObject
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.calls import hold_call
from sluice.gateway.front.http.sse import GenerateFrames
from sluice.pipelines.text.stream import Called
from sluice.state.interface import ABSENT
from sluice.state.log import EventLog

log = logging.getLogger(__name__)
_RENEWALS_PER_LEASE = 3
_PATH = "/v1/responses"
_END_OF_FRAME = b"\n\n"
_ENDING_S = 5.0
"""How long responses may take to end by themselves when the server ends."""


class BackgroundRun:
    """One response that is generated in the background. The events of a streamed one are kept from the first one on."""

    def __init__(self, reply: ResponseReply, generate: GenerateFrames, kept: KeptStream | None) -> None:
        """`generate` pushes the events but for the last one. `kept` takes them; None: nobody may ask for them."""
        self.reply = reply
        self.record = reply.record
        self.generate = generate
        self.kept = kept
        self._num_events = 0
        self._last: list[bytes] = []
        """The last events, among them all that are not in the log yet, or never will be as it was dropped."""
        self.failure: SluiceError | None = None
        """Why it was cancelled, where its client did not wish it."""

    @property
    def response(self) -> JsonObject:
        return self.reply.response

    def append(self, events: bytes) -> None:
        """Add the events that followed, where clients may ask for them."""
        if self.kept is not None and events:
            frames = [frame + _END_OF_FRAME for frame in events.split(_END_OF_FRAME)[:-1]]
            self._last = [*self._unlogged(self.kept), *frames]
            self._num_events += len(frames)
            self.kept.publish(Pieces(frames))

    def _unlogged(self, kept: KeptStream) -> list[bytes]:
        return self._last[len(self._last) - self._num_events + len(kept.log) :]

    def end(self) -> None:
        """Let those who follow go: no more events come."""
        if self.kept is not None:
            self.kept.publish(End(True))

    def frames(self, last: bytes) -> list[bytes] | None:
        """Return its events and the `last` one, for clients that ask later; None where it is not streamed."""
        return None if self.kept is None else [*self.kept.log.kept(), *self._unlogged(self.kept), last]

    def keep(self) -> AbstractContextManager[None]:
        """Keep its events in the context: nobody need read them meanwhile."""
        return nullcontext() if self.kept is None else self.kept.reading()


class BackgroundRuns:
    """The responses that this server generates in the background. A lease in the archive tells other servers so."""

    def __init__(
        self,
        archive: Archive,
        renewal_s: float = LEASE_S / _RENEWALS_PER_LEASE,
        ending_s: float = _ENDING_S,
        streams: StreamStore | None = None,
    ) -> None:
        """`streams` takes the events of streamed responses where it shares streams with other servers."""
        self._archive = archive
        self._streams = streams
        self._renewal_s = renewal_s
        self._ending_s = ending_s
        self._runs: dict[str, BackgroundRun] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._renewals: dict[str, asyncio.Task[None]] = {}

    def find(self, owner: str, response_id: str) -> BackgroundRun | None:
        """Return the owner's response where this server generates it now."""
        run = self._runs.get(response_id)
        return run if run is not None and run.record.owner == owner else None

    async def start(self, reply: ResponseReply, generate: GenerateFrames, *, is_streamed: bool) -> BackgroundRun:
        """Store the response, which is queued, and begin to generate it. Raises UNAVAILABLE where it is not stored."""
        record = reply.record
        run = BackgroundRun(reply, generate, await self._keep_events(reply) if is_streamed else None)
        run.append(reply.queue())
        items = await encode_items(record.items.all)
        stored = StoredResponse(orjson.dumps(record.response), items, session=record.items.session)
        await self._archive.save(record.owner, record.response_id, stored)
        record.version = ABSENT + 1
        await self._archive.renew_lease(record.owner, record.response_id, record.response["status"], ABSENT)
        work = asyncio.create_task(self._generate(run))
        self._runs[record.response_id] = run
        self._work[record.response_id] = work
        self._renewals[record.response_id] = asyncio.create_task(self._renew(run, work))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would never store its end
        return run

    async def _keep_events(self, reply: ResponseReply) -> KeptStream:
        """Return what takes the events of a response, and shares them with other servers where streams are shared."""
        response_id, owner = reply.record.response_id, reply.record.owner
        origin = Origin(response_id, owner, reply.request_id, _PATH, b"", [], b"", False, LEASE_S, began_at=time.time())
        if self._streams is None or self._streams.shared is None:
            return KeptStream(origin, EventLog(), lambda _: None)
        kept = self._streams.add(origin)
        kept.log.max_bytes = None  # the archive gets all of them
        await self._streams.shared.begin(kept, None)
        return kept

    async def cancel(self, run: BackgroundRun) -> None:
        """Stop generating, and wait until that is stored. Nothing happens to a response that has ended."""
        work = self._work.get(run.record.response_id)
        if work is not None:
            _stop(run, work)
            await asyncio.wait((work,))

    async def close(self) -> None:
        """Wait a moment for responses to end, and make those fail that do not."""
        ending = list(self._work.values())
        if ending:
            await asyncio.wait(ending, timeout=self._ending_s)
        for run in list(self._runs.values()):
            run.failure = SluiceError(ErrorCode.UNAVAILABLE, "the server ended before the response was complete")
            await self.cancel(run)

    async def _generate(self, run: BackgroundRun) -> None:
        reply, response_id = run.reply, run.record.response_id
        try:
            with hold_call(), run.keep():
                await run.generate(Called(run.append))
        except asyncio.CancelledError:
            run.append(reply.cancel() if run.failure is None else reply.fail(run.failure))
        try:
            reply.finish()
            last = reply.last()
            await run.record.keep(run.frames(last))
            run.append(last)
        finally:
            run.end()
            self._renewals.pop(response_id).cancel()
            del self._runs[response_id], self._work[response_id]

    async def _renew(self, run: BackgroundRun, work: "asyncio.Task[None]") -> None:
        """Renew the lease of a response until its work ends; end the work where another server ended the lease."""
        record, version = run.record, ABSENT + 1
        while True:
            await asyncio.sleep(self._renewal_s)
            status = record.response["status"]
            try:
                if not await self._archive.renew_lease(record.owner, record.response_id, status, version):
                    break
                version += 1
            except SluiceError as error:
                log.warning("the lease of response %s is not renewed: %s", record.response_id, error.message)
        _stop(run, work)


def _stop(run: BackgroundRun, work: "asyncio.Task[None]") -> None:
    """Cancel the generation, unless it has ended and is being stored."""
    if run.response["status"] not in FINAL:
        work.cancel()
