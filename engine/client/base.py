"""The asyncio side of an engine, which the gateway holds. `engine/client/process.py` has the executor in a process of
its own; the tests have one on a thread of theirs."""

import asyncio
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from time import perf_counter

import msgspec

from engine.client.stream import GenerationStream
from engine.client.supervision import MAX_SHARED_CRASHES, RecoveryQueue, build_resumed_request
from engine.config import EngineConfig
from engine.frames import AdapterOutcome, Cancel, Command, LoadAdapter, StepFrame, Submit, UnloadAdapter
from engine.scheduling.admission import check_reported_queue
from engine.types import EngineInfo, EngineStats, GenerateRequest
from engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

SILENT_S = 1.0
"""An engine may hang if it sends nothing for this long. An idle one sends a heartbeat twice as often."""
GRACE_S = 0.25
"""How long after a deadline the client waits for the engine's own answer."""
NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)

_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
_GAUGES = tuple(n for n in EngineStats.__struct_fields__ if not n.endswith("_total") and n != "iteration")


class EngineClient(ABC):
    """Submits requests and passes each stream its events. All methods run on one event loop."""

    can_restart = False
    """Whether a lost engine is replaced. If not, it stays dead."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = NO_STATS
        self.failure: str | None = None
        """The reason why the engine is dead; None while it is not."""
        self.is_restarting = False
        """Whether a new engine is being started in place of one that crashed or hung."""
        self.num_restarts = 0
        """Engines started in place of a lost one."""
        self.recovery_seconds_total = 0.0
        self.last_recovery_s = 0.0
        """Seconds from the detection of a loss until the new engine was ready."""
        self.num_resumed = 0
        """Requests that were sent to a new engine, to continue where the lost one had stopped."""
        self.num_poisoned = 0
        """Requests that failed because the engine crashed on them repeatedly."""
        self.adapters = dict(config.lora_modules)
        """Folders of the LoRA adapters that were given or loaded, by name. A new engine gets the same ones."""
        self._adapter_lock = asyncio.Lock()
        self._adapter_answer: asyncio.Future[AdapterOutcome] | None = None
        self._adapter_name = ""
        """The answer to the command under way, and the adapter's name in it."""
        self._info: EngineInfo | None = None
        self._streams: dict[int, GenerationStream] = {}
        self._queue = RecoveryQueue()
        self._timers = RequestTimers(self._has_started, self._fail)
        # The first id is random, so that the ids of several clients of one engine do not collide.
        self._stream_ids = itertools.count(secrets.randbits(62))
        self._last_report = perf_counter()
        self._stats_before = NO_STATS

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises UNAVAILABLE before `start` has returned."""
        if self._info is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine is still loading")
        return self._info

    @abstractmethod
    async def start(self) -> None:
        """Load the model. Returns when the engine is ready for requests. Raises SluiceError if loading fails."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine. Open streams end in an error. Idempotent."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue `request`. Raises INVALID for a request that can never be served, UNAVAILABLE without an engine. If the
        engine's queue is full, the first event of the stream raises OVERLOADED. While a lost engine is being replaced,
        requests are queued here, and a full queue raises OVERLOADED at once."""
        if self.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure)
        check_request(request, self.info)
        is_open = self._queue.is_open
        if not is_open:
            self._check_queue_limit()
        stream = GenerationStream(next(self._stream_ids), with_seed(request), self._cancel)
        stream.was_delayed = not is_open
        self._streams[stream.stream_id] = stream
        self._timers.watch(stream.stream_id, request)
        self._queue.add(stream.stream_id)
        self._send_due()
        return stream

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load the LoRA adapter in the folder `path`. Raises INVALID for a name that is taken, unless it `replaces`
        that adapter, and the engine's error for one that it does not take; nothing has changed then."""
        async with self._adapter_lock:
            if name in self.info.adapters and not replaces:
                raise invalid("lora_name", f"LoRA adapter {name!r} has already been loaded; load_inplace replaces it")
            await self._change_adapters(LoadAdapter(name, path))
            self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Requests in flight with it end as usual. Raises NOT_FOUND for an unknown name."""
        async with self._adapter_lock:
            if name not in self.info.adapters:
                known = ", ".join(self.info.adapters) or "none"
                message = f"there is no LoRA adapter {name!r}; loaded: {known}"
                raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")
            await self._change_adapters(UnloadAdapter(name))
            self.adapters.pop(name, None)

    async def _change_adapters(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Wait for the engine's answer, which comes, or the loss of the engine does."""
        if self.failure is not None or self.is_restarting:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure or "the engine is restarting")
        self._adapter_answer, self._adapter_name = asyncio.get_running_loop().create_future(), command.name
        try:
            self._send(command)
            (await self._adapter_answer).check()
        finally:
            self._adapter_answer = None

    def _reload_adapters(self) -> None:
        """Load into a new engine what was loaded into the lost one. It was started with those of `_config_now`."""
        started = self._config_now().lora_modules
        for name in self.adapters.keys() - started.keys():
            self._send(LoadAdapter(name, self.adapters[name]))
        self._set_adapters((*self.info.adapters, *(self.adapters.keys() - started.keys())))

    def _config_now(self) -> EngineConfig:
        """Return the configuration for another engine: without the adapters that were unloaded or replaced since."""
        modules = self.config.lora_modules
        kept = {name: path for name, path in modules.items() if self.adapters.get(name) == path}
        has_room = self.config.enable_lora or bool(modules)
        return msgspec.structs.replace(self.config, lora_modules=kept, enable_lora=has_room)

    def _set_adapters(self, names: Iterable[str]) -> None:
        self._info = msgspec.structs.replace(self.info, adapters=tuple(sorted(set(names))))

    def _on_adapter_outcome(self, outcome: AdapterOutcome) -> None:
        is_answer = self._adapter_answer is not None and self._adapter_name == outcome.name
        if outcome.code is None:  # those of the last engine are still to come
            self._set_adapters((*outcome.adapters, *(() if is_answer else self.adapters)))
        elif not is_answer:
            log.error("LoRA adapter %s is lost with the last engine: %s", outcome.name, outcome.message)
            self.adapters.pop(outcome.name, None)
            self._set_adapters(name for name in self.info.adapters if name != outcome.name)
        if is_answer and self._adapter_answer is not None and not self._adapter_answer.done():
            self._adapter_answer.set_result(outcome)

    def _fail_adapter_command(self, reason: str) -> None:
        if self._adapter_answer is not None and not self._adapter_answer.done():
            self._adapter_answer.set_exception(SluiceError(ErrorCode.UNAVAILABLE, reason))

    def refuse_if_full(self) -> None:
        """Raise OVERLOADED if a request would find a full queue. For callers with work to do before they submit."""
        check_reported_queue(self.stats, self.info.max_num_seqs, self.config)

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error` and free its resources in the engine."""
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.fail(error)

    def heartbeat_age_s(self) -> float:
        """Return the seconds since the engine's last frame. It sends one at each step, and twice a second when idle."""
        return perf_counter() - self._last_report

    # -- commands

    def _check_queue_limit(self) -> None:
        """Apply the engine's queue limit while there is no engine to apply it."""
        limit = self.info.max_num_seqs + self.config.max_queued_requests
        if len(self._streams) < limit:
            return
        message = f"the engine is restarting and {len(self._streams)} requests wait for it; the limit is {limit}"
        retry_after_s = max(1.0, self.info.load_seconds)
        raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s)

    def _send_due(self) -> None:
        """Send all streams that may go to the engine now."""
        while due := self._queue.take_due():
            for stream_id in due:
                stream = self._streams[stream_id]
                try:
                    self._send(Submit(stream_id, self._current_request(stream), stream.was_sent))
                except SluiceError as error:
                    self._fail(stream_id, error)
                    continue
                self.num_resumed += stream.was_sent
                stream.was_sent = True

    @staticmethod
    def _current_request(stream: GenerationStream) -> GenerateRequest:
        """Return the request for an engine that gets it now. Raises DEADLINE if no time is left."""
        if not stream.was_delayed:
            return stream.request
        elapsed_s = perf_counter() - stream.submitted_at
        return build_resumed_request(stream.request, stream.output_token_ids, elapsed_s, stream.has_started)

    def _cancel(self, stream_id: int) -> None:
        was_sent = self._queue.is_sent(stream_id)
        if self._forget(stream_id) is not None and was_sent and self.failure is None:
            self._send(Cancel(stream_id))
        if not self._queue.is_open:
            self._send_due()

    def _fail(self, stream_id: int, error: SluiceError) -> None:
        """End a stream with `error`, here and in the engine."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.cancel()
            stream.fail(error)

    def _forget(self, stream_id: int) -> GenerationStream | None:
        self._queue.remove(stream_id)
        self._timers.remove(stream_id)
        return self._streams.pop(stream_id, None)

    # -- reports

    def _on_frame(self, frame: StepFrame) -> None:
        self.stats = frame.stats if self.num_restarts == 0 else add_counters(self._stats_before, frame.stats)
        self._last_report = perf_counter()
        for outcome in frame.adapters:
            self._on_adapter_outcome(outcome)
        unproven = self._queue.unproven
        for event in frame.events:
            # A stream that was cancelled here may still have events on the way.
            stream = self._streams.get(event.stream_id)
            if stream is None:
                continue
            if event.finish_reason is not None:
                self._forget(event.stream_id)
            elif event.stream_id in unproven:
                self._queue.mark_proven(event.stream_id)
            stream.push(event)
        for failure in frame.failures:
            stream = self._forget(failure.stream_id)
            if stream is not None:
                error = SluiceError(failure.code, failure.message, param=failure.param)
                error.retry_after_s = failure.retry_after_s
                stream.fail(error)
        if not self._queue.is_open:
            self._send_due()

    def _has_started(self, stream_id: int, deadline: float) -> bool | None:
        """Return whether the engine began the request by `deadline`; None if that is not known yet."""
        stream = self._streams[stream_id]
        is_sent = self._queue.is_sent(stream_id)
        # If the engine has sent a frame since, it would have failed a request that still waited.
        stream.has_started = bool(stream.output_token_ids) or (is_sent and self._last_report > deadline)
        if is_sent and not stream.has_started and self.heartbeat_age_s() < SILENT_S:
            return None
        return stream.has_started

    # -- loss and recovery of the engine

    def _begin_recovery(self) -> None:
        """Stop sending to the lost engine. Frames it has sent may still arrive."""
        self.is_restarting = True
        self._fail_adapter_command("the engine was lost while it changed its LoRA adapters")
        self._queue.close()
        for stream in self._streams.values():
            stream.was_delayed = True

    def _requeue_streams(self) -> bool:
        """Queue the lost engine's streams for the next one. Returns whether some are abandoned as the cause."""
        self.stats = self._stats_before = without_gauges(self.stats)
        abandoned = self._queue.requeue_after_crash()
        for stream_id in abandoned.poisonous:
            self._abandon(stream_id, "this request crashed the engine twice")
        for stream_id in abandoned.exhausted:
            self._abandon(stream_id, f"the engine crashed {MAX_SHARED_CRASHES} times while it worked on this request")
        self.num_poisoned += len(abandoned.poisonous)
        return bool(abandoned.poisonous or abandoned.exhausted)

    def _abandon(self, stream_id: int, message: str) -> None:
        log.error("request %s is not tried again: %s", self._streams[stream_id].request.request_id, message)
        self._fail(stream_id, SluiceError(ErrorCode.INTERNAL, message))

    def _end_recovery(self, recovery_s: float) -> None:
        """Send the queued streams to the new engine, which was ready `recovery_s` after the loss was detected."""
        self._last_report = perf_counter()
        self.is_restarting = False
        self._reload_adapters()
        self.num_restarts += 1
        self.last_recovery_s = recovery_s
        self.recovery_seconds_total += recovery_s
        self._queue.open()
        self._send_due()

    def _die(self, reason: str) -> None:
        """Fail all streams, because there will be no engine any more."""
        if self.failure is not None:
            return
        self.failure = reason
        self.is_restarting = False
        self._fail_adapter_command(reason)
        for stream_id, stream in list(self._streams.items()):
            self._forget(stream_id)
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, reason))


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """Return `request` with a seed if it samples at random, so that any engine draws the same tokens."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.temperature == 0.0:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, seed=secrets.randbits(63)))


def add_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with its counters continued from those of `before`, because exported counters must not decrease."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    return msgspec.structs.replace(now, **sums)


def without_gauges(stats: EngineStats) -> EngineStats:
    """Return the counters of a lost engine, with all gauges at 0."""
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0), iteration=None)


HasStarted = Callable[[int, float], bool | None]
Expire = Callable[[int, SluiceError], None]


class RequestTimers:
    """Timers for the deadlines of one client's streams, on one event loop.

    The engine enforces the deadlines itself. The timers are for an engine that hangs, that is being replaced, or that
    has not been sent the request yet. `has_started(stream_id, deadline)` tells whether the engine began the request
    before `deadline` (by perf_counter), None if that is not known yet. `expire` ends a stream with an error.
    """

    def __init__(self, has_started: HasStarted, expire: Expire) -> None:
        self._has_started = has_started
        self._expire = expire
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    def watch(self, stream_id: int, request: GenerateRequest) -> None:
        """Start the timers of a request that was submitted now."""
        if request.timeout_s is None and request.queue_timeout_s is None:
            return
        self._timers[stream_id] = []
        if request.timeout_s is not None:
            error = _deadline_error(f"was not complete within its {request.timeout_s:g} s")
            self._call_later(request.timeout_s + GRACE_S, self._expire, stream_id, error)
        if request.queue_timeout_s is not None:
            error = _deadline_error(f"waited for longer than its {request.queue_timeout_s:g} s")
            deadline = perf_counter() + request.queue_timeout_s
            self._call_later(request.queue_timeout_s + GRACE_S, self._check_start, stream_id, error, deadline)

    def remove(self, stream_id: int) -> None:
        """Cancel the timers of a stream that has ended."""
        for timer in self._timers.pop(stream_id, ()):
            timer.cancel()

    def _check_start(self, stream_id: int, error: SluiceError, deadline: float) -> None:
        has_started = self._has_started(stream_id, deadline)
        if has_started is None:
            self._call_later(GRACE_S, self._check_start, stream_id, error, deadline)
        elif not has_started:
            self._expire(stream_id, error)

    def _call_later(self, delay_s: float, action: Callable[..., None], stream_id: int, *arguments: object) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, action, stream_id, *arguments)
        self._timers[stream_id].append(timer)


def _deadline_error(problem: str) -> SluiceError:
    return SluiceError(ErrorCode.DEADLINE, f"the request {problem}")
