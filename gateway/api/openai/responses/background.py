"""Responses that are generated in the background: their tasks, and the events that clients may follow."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import orjson

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import End, KeptStream, Origin, Pieces
from sluice.gateway.answers.streams.store import StreamStore
from sluice.gateway.api.openai.responses.archive import FINAL, LEASE_S, Archive, StoredResponse
from sluice.gateway.api.openai.responses.generate import ResponseTurn, generate, keep
from sluice.gateway.api.openai.responses.items import JsonObject
from sluice.gateway.calls import hold_call
from sluice.pipelines.text.consumers import Called
from sluice.state.interface import ABSENT
from sluice.state.log import EventLog

log = logging.getLogger(__name__)
_RENEWALS_PER_LEASE = 3
_PATH = "/v1/responses"
_ENDING_S = 5.0
"""How long responses may take to end by themselves when the server ends."""


class BackgroundRun:
    """One response that is generated in the background. The events of a streamed one are kept from the first one on."""

    def __init__(self, turn: ResponseTurn, kept: KeptStream | None) -> None:
        """`kept` takes the events; None: nobody may ask for them."""
        self.turn = turn
        self.kept = kept
        self._num_events = 0
        self._last: list[bytes] = []
        """The last events, among them all that are not in the log yet, or never will be as it was dropped."""
        self.failure: SluiceError | None = None
        """Why it was cancelled, where its client did not wish it."""

    @property
    def response(self) -> JsonObject:
        return self.turn.response

    def append(self, frames: list[bytes]) -> None:
        """Add the events that followed, where clients may ask for them."""
        if self.kept is not None:
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
        find_streams: Callable[[], StreamStore | None] = lambda: None,
    ) -> None:
        """`find_streams` returns the kept streams, where there are some."""
        self._archive = archive
        self._find_streams = find_streams
        self._renewal_s = renewal_s
        self._ending_s = ending_s
        self._runs: dict[str, BackgroundRun] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._renewals: dict[str, asyncio.Task[None]] = {}

    def find(self, owner: str, response_id: str) -> BackgroundRun | None:
        """Return the owner's response where this server generates it now."""
        run = self._runs.get(response_id)
        return run if run is not None and run.turn.owner == owner else None

    async def start(self, turn: ResponseTurn, *, is_streamed: bool) -> BackgroundRun:
        """Store the response, which is queued, and begin to generate it. Raises UNAVAILABLE where it is not stored."""
        run = BackgroundRun(turn, await self._keep_events(turn) if is_streamed else None)
        run.append(turn.reply.queue())
        stored = StoredResponse(orjson.dumps(turn.response), orjson.dumps(turn.items.all), session=turn.items.session)
        await self._archive.save(turn.owner, turn.response_id, stored)
        turn.version = ABSENT + 1
        await self._archive.renew_lease(turn.owner, turn.response_id, turn.response["status"], ABSENT)
        work = asyncio.create_task(self._generate(run))
        self._runs[turn.response_id] = run
        self._work[turn.response_id] = work
        self._renewals[turn.response_id] = asyncio.create_task(self._renew(run, work))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would never store its end
        return run

    async def _keep_events(self, turn: ResponseTurn) -> KeptStream:
        """Return what takes the events of a response, and shares them with other servers where streams are shared."""
        streams = self._find_streams()
        origin = Origin(
            turn.response_id, turn.owner, turn.request_id, _PATH, b"", [], b"", False, LEASE_S, began_at=time.time()
        )
        if streams is None or streams.shared is None:
            return KeptStream(origin, EventLog(), lambda _: None)
        kept = streams.add(origin)
        kept.log.max_bytes = None  # the archive gets all of them
        await streams.shared.begin(kept, None)
        return kept

    async def cancel(self, run: BackgroundRun) -> None:
        """Stop generating, and wait until that is stored. Nothing happens to a response that has ended."""
        work = self._work.get(run.turn.response_id)
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
        turn = run.turn
        try:
            with hold_call(), run.keep():
                await generate(turn, Called(run.append))
        except asyncio.CancelledError:
            run.append(turn.reply.cancel() if run.failure is None else turn.reply.fail(run.failure))
        try:
            last = turn.reply.closing()
            await keep(turn, self._archive, run.frames(last))
            run.append([last])
        finally:
            run.end()
            self._renewals.pop(turn.response_id).cancel()
            del self._runs[turn.response_id], self._work[turn.response_id]

    async def _renew(self, run: BackgroundRun, work: "asyncio.Task[None]") -> None:
        """Renew the lease of a response until its work ends; end the work where another server ended the lease."""
        turn, version = run.turn, ABSENT + 1
        while True:
            await asyncio.sleep(self._renewal_s)
            try:
                if not await self._archive.renew_lease(turn.owner, turn.response_id, turn.response["status"], version):
                    break
                version += 1
            except SluiceError as error:
                log.warning("the lease of response %s is not renewed: %s", turn.response_id, error.message)
        _stop(run, work)


def _stop(run: BackgroundRun, work: "asyncio.Task[None]") -> None:
    """Cancel the generation, unless it has ended and is being stored."""
    if run.response["status"] not in FINAL:
        work.cancel()
