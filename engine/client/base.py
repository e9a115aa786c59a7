"""The async side of the engine: what the gateway holds. Here asyncio and the engine meet.

Two clients, one behaviour: `engine/client/process.py` has the executor in a process of its own,
`engine/client/thread.py` on a thread of this one.
"""

import asyncio
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter

import msgspec

from engine.client.stream import GenerationStream
from engine.client.supervision import MAX_SHARED_CRASHES, RecoveryQueue, build_resumed_request
from engine.config import EngineConfig
from engine.frames import Cancel, Command, StepFrame, Submit
from engine.scheduling.admission import check_reported_queue
from engine.types import EngineInfo, EngineStats, GenerateRequest
from engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

SILENT_S = 1.0
"""An engine that said nothing for so long may hang: idle it speaks twice as often."""


class EngineClient(ABC):
    """Submits requests and hands each stream its events. All methods run on one event loop."""

    can_restart = False
    """Whether a lost engine is replaced. If not, it stays dead."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = NO_STATS
        self.failure: str | None = None
        """Why the engine is dead; None while it is not."""
        self.is_restarting = False
        """Whether a new engine is being started in place of one that crashed or hung."""
        self.num_restarts = 0
        """Engines started in place of one that was lost."""
        self.recovery_seconds_total = 0.0
        self.last_recovery_s = 0.0
        """From noticing a loss until the new engine was ready."""
        self.num_resumed = 0
        """Requests given to a new engine, to go on where the lost one had left them."""
        self.num_poisoned = 0
        """Requests failed because the engine crashed on them repeatedly."""
        self._info: EngineInfo | None = None
        self._streams: dict[int, GenerationStream] = {}
        self._roster = RecoveryQueue()
        self._time_limits = RequestTimers(self._has_started, self._fail)
        # The first number is random, so that several clients of one engine do not meet.
        self._stream_ids = itertools.count(secrets.randbits(62))
        self._last_report = perf_counter()
        self._stats_before = NO_STATS

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises UNAVAILABLE before `start` returned."""
        if self._info is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine is still loading")
        return self._info

    @abstractmethod
    async def start(self) -> None:
        """Load the model; returns when the engine can be asked. Raises SluiceError where it cannot."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; streams under way end in an error. Idempotent."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue `request`. Raises INVALID for what can never be served, UNAVAILABLE without an engine.

        A full queue is told by the stream: its first event raises OVERLOADED. While a lost engine is replaced the
        queue is here, and a full one raises OVERLOADED at once.
        """
        if self.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure)
        check_request(request, self.info)
        is_open = self._roster.is_open
        if not is_open:
            self._check_room()
        stream = GenerationStream(next(self._stream_ids), with_seed(request), self._cancel)
        stream.was_late = not is_open
        self._streams[stream.stream_id] = stream
        self._time_limits.watch(stream.stream_id, request)
        self._roster.add(stream.stream_id)
        self._send_due()
        return stream

    def refuse_if_full(self) -> None:
        """Raise OVERLOADED where a request would find a full queue: for who has work to do before it can submit one."""
        check_reported_queue(self.stats, self.info.max_num_seqs, self.config)

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error` and free what it holds in the engine."""
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.fail(error)

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last said anything. It speaks at every step, and when idle twice a second."""
        return perf_counter() - self._last_report

    # -- commands

    def _check_room(self) -> None:
        """The bound that the engine keeps, while it is not there to keep it."""
        most = self.info.max_num_seqs + self.config.max_queued_requests
        if len(self._streams) < most:
            return
        message = f"the engine is restarting and {len(self._streams)} requests wait for it; the limit is {most}"
        retry_after_s = max(1.0, self.info.load_seconds)
        raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)

    def _send_due(self) -> None:
        """Send whoever may go to the engine now."""
        while due := self._roster.take_due():
            for stream_id in due:
                stream = self._streams[stream_id]
                try:
                    self._send(Submit(stream_id, self._request_now(stream), stream.was_sent))
                except SluiceError as error:
                    self._fail(stream_id, error)
                    continue
                self.num_resumed += stream.was_sent
                stream.was_sent = True

    @staticmethod
    def _request_now(stream: GenerationStream) -> GenerateRequest:
        """Raises DEADLINE where its time is over."""
        if not stream.was_late:
            return stream.request
        elapsed_s = perf_counter() - stream.submitted_at
        return build_resumed_request(stream.request, stream.output_token_ids, elapsed_s, stream.has_started)

    def _cancel(self, stream_id: int) -> None:
        was_sent = self._roster.is_sent(stream_id)
        if self._forget(stream_id) is not None and was_sent and self.failure is None:
            self._send(Cancel(stream_id))
        if not self._roster.is_open:
            self._send_due()

    def _fail(self, stream_id: int, error: SluiceError) -> None:
        """End a stream with `error`, here and in the engine."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.cancel()
            stream.fail(error)

    def _forget(self, stream_id: int) -> GenerationStream | None:
        self._roster.drop(stream_id)
        self._time_limits.drop(stream_id)
        return self._streams.pop(stream_id, None)

    # -- reports

    def _on_frame(self, frame: StepFrame) -> None:
        self.stats = frame.stats if self.num_restarts == 0 else add_counters(self._stats_before, frame.stats)
        self._last_report = perf_counter()
        unproven = self._roster.unproven
        for event in frame.events:
            # A stream that was cancelled here may still have events on the way.
            stream = self._streams.get(event.stream_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                self._forget(event.stream_id)
            elif event.stream_id in unproven:
                self._roster.prove(event.stream_id)
            stream.push(event)
        for failure in frame.failures:
            stream = self._forget(failure.stream_id)
            if stream is not None:
                error = SluiceError(failure.code, failure.message, param=failure.param)
                error.retry_after_s = failure.retry_after_s
                stream.fail(error)
        if not self._roster.is_open:
            self._send_due()

    def _has_started(self, stream_id: int, deadline: float) -> bool | None:
        """Whether the engine began the request by `deadline`; None while it might not have come to say so."""
        stream = self._streams[stream_id]
        is_sent = self._roster.is_sent(stream_id)
        # An engine that has spoken since had refused the request if it still waited.
        stream.has_started = bool(stream.output_token_ids) or (is_sent and self._last_report > deadline)
        if is_sent and not stream.has_started and self.heartbeat_age_s() < SILENT_S:
            return None
        return stream.has_started

    # -- the engine's end

    def _begin_loss(self) -> None:
        """The engine is lost; nothing is sent to it any more, though it may still be heard."""
        self.is_restarting = True
        self._roster.close()
        for stream in self._streams.values():
            stream.was_late = True

    def _lose(self) -> bool:
        """The engine is gone; what it worked on waits for the next one. Returns whether requests were to blame."""
        self.stats = self._stats_before = without_gauges(self.stats)
        verdict = self._roster.crash()
        for stream_id in verdict.poisonous:
            self._blame(stream_id, "this request crashed the engine twice")
        for stream_id in verdict.unlucky:
            self._blame(stream_id, f"the engine crashed {MAX_SHARED_CRASHES} times while it worked on this request")
        self.num_poisoned += len(verdict.poisonous)
        return bool(verdict.poisonous or verdict.unlucky)

    def _blame(self, stream_id: int, message: str) -> None:
        log.error("request %s is not tried again: %s", self._streams[stream_id].request.request_id, message)
        self._fail(stream_id, SluiceError(ErrorCode.INTERNAL, message))

    def _regain(self, recovery_s: float) -> None:
        """A new engine is ready, `recovery_s` after the loss was noticed."""
        self._last_report = perf_counter()
        self.is_restarting = False
        self.num_restarts += 1
        self.last_recovery_s = recovery_s
        self.recovery_seconds_total += recovery_s
        self._roster.open()
        self._send_due()

    def _die(self, reason: str) -> None:
        """The engine is gone for good: every waiter hears of it."""
        if self.failure is not None:
            return
        self.failure = reason
        self.is_restarting = False
        for stream_id, stream in list(self._streams.items()):
            self._forget(stream_id)
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, reason))


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """`request` with a seed of its own where it draws random numbers, so that any engine draws the same."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0.0:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=secrets.randbits(63)))


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)

_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
_GAUGES = tuple(n for n in EngineStats.__struct_fields__ if not n.endswith("_total") and n != "iteration")


def add_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """`now` with its counters continued from where those of `before` stopped."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    return msgspec.structs.replace(now, **sums)


def without_gauges(stats: EngineStats) -> EngineStats:
    """The counters of an engine that is gone; it holds nothing any more."""
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0), iteration=None)


GRACE_S = 0.25
"""How long after a deadline the engine's own answer is awaited."""

HasStarted = Callable[[int, float], bool | None]
Expire = Callable[[int, SluiceError], None]


class RequestTimers:
    """Timers of one client's streams, by stream id; on one event loop.

    `has_started(stream_id, deadline)` says whether the engine began the request before `deadline` (by
    perf_counter), None where that cannot be told yet. `expire` ends a stream with an error.
    """

    def __init__(self, has_started: HasStarted, expire: Expire) -> None:
        self._has_started = has_started
        self._expire = expire
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    def watch(self, stream_id: int, request: GenerateRequest) -> None:
        """The request was submitted now."""
        if request.timeout_s is None and request.queue_timeout_s is None:
            return
        self._timers[stream_id] = []
        if request.timeout_s is not None:
            late = _too_late(f"was not complete within its {request.timeout_s:g} s")
            self._call_later(request.timeout_s + GRACE_S, self._expire, stream_id, late)
        if request.queue_timeout_s is not None:
            late = _too_late(f"waited for longer than its {request.queue_timeout_s:g} s")
            deadline = perf_counter() + request.queue_timeout_s
            self._call_later(request.queue_timeout_s + GRACE_S, self._check_start, stream_id, late, deadline)

    def drop(self, stream_id: int) -> None:
        """The stream has ended, however."""
        for timer in self._timers.pop(stream_id, ()):
            timer.cancel()

    def _check_start(self, stream_id: int, late: SluiceError, deadline: float) -> None:
        has_started = self._has_started(stream_id, deadline)
        if has_started is None:
            self._call_later(GRACE_S, self._check_start, stream_id, late, deadline)
        elif not has_started:
            self._expire(stream_id, late)

    def _call_later(self, delay_s: float, action: Callable[..., None], stream_id: int, *arguments: object) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, action, stream_id, *arguments)
        self._timers[stream_id].append(timer)


def _too_late(what: str) -> SluiceError:
    return SluiceError(ErrorCode.DEADLINE, f"the request {what}")
