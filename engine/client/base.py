"""The asyncio side of an engine, which the gateway holds. `engine/client/process.py` has the executor in a process of
its own; the tests have one on a thread of theirs."""

import asyncio
import itertools
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter

import msgspec

from sluice.engine.client.stream import EventRelay, GenerationStream, PrefillCount
from sluice.engine.client.supervision import (
    MAX_SHARED_CRASHES,
    Clock,
    KnownAdapters,
    RecoveryCounts,
    RecoveryQueue,
    Standing,
    with_seed,
)
from sluice.engine.client.viewing import EngineViewer
from sluice.engine.config import EngineConfig
from sluice.engine.frames import (
    AdapterOutcome,
    AskProbe,
    Cancel,
    ChangeCommand,
    Command,
    LoadAdapter,
    PrefixChanges,
    Profile,
    ProfiledStep,
    Sleep,
    SleepMode,
    SleepOutcome,
    StepFrame,
    StepProfile,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from sluice.engine.scheduling.admission import check_reported_queue, check_waiting
from sluice.engine.statistics import NO_STATS, add_counters, without_gauges
from sluice.engine.types import BlockSource, EngineInfo, GenerateRequest, RequestFailed
from sluice.engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.files import files_mark
from sluice.log_relay import about
from sluice.record.spans import current_span

log = logging.getLogger(__name__)

SILENT_S = 1.0
"""An engine may hang if it sends nothing for this long. An idle one sends a heartbeat twice as often."""
GRACE_S = 0.25
"""How long after a deadline the client waits for the engine's own answer."""

OnGone = Callable[[], None]
"""Called where a stream that is held ends or moves."""
OnPrefixes = Callable[[PrefixChanges], None]
"""Hears what enters and leaves the engine's prefix index."""


class Replica:
    """A replica is one engine of those that serve together: its client, and what was counted of it. The only engine of
    a model is the replica "". Belongs to the client's event loop."""

    def __init__(self, name: str, engine: "EngineClient", *, version: str = "", weight: float = 1.0) -> None:
        """Replicas of one `version` share its `weight`: the requests that it gets in relation to those of other
        versions."""
        self.name = name
        self.engine = engine
        self.version = version
        self.weight = weight
        self.number = 0
        """Its number in the fleet's prefix index, given by the fleet."""
        self.is_draining = False
        """Whether it gets no further requests, because it leaves the fleet."""
        self.num_routed = 0
        """Requests that were sent here first."""
        self.num_prefilled = 0
        """Prompts that were sent here to be computed for another replica."""
        self.num_adopted = 0
        """Streams that go on here since another replica was lost or drained."""
        engine.replica = self

    @property
    def is_leaving(self) -> bool:
        """Whether it gets no further requests: it leaves the fleet, or its engine is about to end."""
        return self.is_draining or self.engine.stats.is_draining

    @property
    def is_prefill(self) -> bool:
        """Whether it is there to compute prompts for others."""
        return self.engine.info.is_prefill

    def has_adapter(self, name: str) -> bool:
        """Whether it serves requests with this LoRA adapter; "" is the model without any."""
        return not name or name in self.engine.info.adapters


class StreamKeeper(ABC):
    """Hears of the engines of several clients, and moves streams between them."""

    @abstractmethod
    def on_lost(self, lost: Replica) -> None:
        """Hear that an engine is lost, and that its streams are queued again. The client's `failure` says if there is
        no next one."""

    @abstractmethod
    async def until_resumed(self, lost: Replica) -> None:
        """Wait until the streams that moved away from a lost engine have gone on, for a moment at most."""

    @abstractmethod
    def on_back(self, back: Replica) -> None:
        """Hear that a new engine serves in place of one that was lost."""

    @abstractmethod
    def on_refused(self, refusing: Replica, stream: GenerationStream, failure: RequestFailed) -> None:
        """Hear that an engine had no room for a new stream, which its client has forgotten: it ends in an error, or
        goes on elsewhere."""


class EngineClient(ABC):
    """Submits requests and passes each stream its events. All methods run on one event loop."""

    can_restart = False
    """Whether a lost engine is replaced. If not, it stays dead."""
    viewer: EngineViewer | None = None
    """Shows what the engine does; None for one that cannot be asked."""

    # What only a fleet has (`sluice.engine.fleet.client.FleetClient`), so that nobody need ask which of them this is.
    is_asleep, num_held, waking_s = False, 0, 0.0
    handover = routing = members = None

    def __init__(self, config: EngineConfig, clock: Clock = perf_counter) -> None:
        self.config = config
        self._clock = clock
        self.stats = NO_STATS
        self.failure: str | None = None
        """The reason why the engine is dead; None while it is not."""
        self.is_restarting = False
        """Whether a new engine is being started in place of one that crashed or hung."""
        self.recoveries = RecoveryCounts()
        self.is_sleeping = False
        """Whether the engine was put to sleep. A new one in place of one that was lost asleep goes to sleep too."""
        self.replica = Replica("", self)
        """This client as the only replica, for readers of several."""
        self.keeper: StreamKeeper | None = None
        """Moves streams of this client to other engines; None where it has the only one."""
        self._lora = KnownAdapters(dict(config.lora_modules))
        self.adapter_marks = {name: files_mark(Path(path), is_flat=True) for name, path in self.adapters.items()}
        """Marks of the files in the adapters' folders when they were given or loaded, by name."""
        self._last_sleep = Sleep()
        self._changing = asyncio.Lock()
        """Held while a command that changes the engine is sent, answered and acted on."""
        self._change: tuple[str, asyncio.Future[AdapterOutcome | SleepOutcome]] | None = None
        """The adapter that the change under way is about, "" for one about sleep, and the engine's answer to come."""
        self._on_prefixes: OnPrefixes | None = None
        self._profiles: list[tuple[float, StepProfile]] | None = None
        """The profiles of the recording under way, each with the seconds that this process's clock is ahead."""
        self._info: EngineInfo | None = None
        self._streams: dict[int, GenerationStream] = {}
        self._queue = RecoveryQueue()
        self._held_for_prompts: dict[int, OnGone] = {}
        self._prefills = PrefillCount()
        self._relay = EventRelay()
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}
        # The first id is random, so that the ids of several clients of one engine do not collide.
        self._stream_ids = itertools.count(secrets.randbits(62))
        self._last_report = self._clock()
        self._stats_before = NO_STATS

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises UNAVAILABLE before `start` has returned."""
        if self._info is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the engine is still loading")
        return self._info

    @property
    def is_loaded(self) -> bool:
        """Whether `info` is known."""
        return self._info is not None

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The engines that serve as this one: itself alone."""
        return (self.replica,)

    def session_replica(self, session: str) -> str:
        """Return the replica that had the session's last request; "" for one engine alone."""
        return ""

    @property
    def is_serving(self) -> bool:
        """Whether an engine takes requests, as far as is known."""
        return self._info is not None and self.failure is None and not self.is_restarting

    @property
    def is_open(self) -> bool:
        """Whether a request goes to an engine at once. If not, it waits here for one, or for probes (`RecoveryQueue`)
        to end."""
        return self.is_serving and self._queue.is_open

    @property
    def open_streams(self) -> list[GenerationStream]:
        """The streams that have not ended, in the order of their submits."""
        return list(self._streams.values())

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens that the engine is to compute for this client's streams without a token."""
        return self._prefills.num_tokens

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that this client has started; none by default."""
        return ()

    def kill(self) -> None:  # noqa: B027 - most clients have started none
        """End the processes that this client has started now. Only for a process that is about to exit itself;
        otherwise use `stop`."""

    @property
    def on_prefixes(self) -> OnPrefixes | None:
        """Called with what is in the engine's prefix index, and with each change. The engine says it while this is
        set; one whose runtime has its own cache says nothing. A new engine begins anew."""
        return self._on_prefixes

    @on_prefixes.setter
    def on_prefixes(self, callback: OnPrefixes | None) -> None:
        self._on_prefixes = callback
        self._ask_prefixes()

    def restart_prefixes(self) -> None:  # noqa: B027 - as below
        """Let the engine say anew what is in its prefix index, for who has missed a message."""

    def _ask_prefixes(self) -> None:  # noqa: B027 - an engine in this process has nobody to tell
        """Tell the engine whether its prefix index is wanted."""

    async def wait_awake(self) -> None:  # noqa: B027 - only a fleet may have no engine
        """Return at once: this client has its engine, or is about to have another."""

    @abstractmethod
    async def start(self) -> None:
        """Load the model. Returns when the engine is ready for requests. Raises SluiceError if loading fails."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine. Open streams end in an error. Idempotent."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def submit(
        self,
        request: GenerateRequest,
        most_wait_s: float | None = None,
        num_cached_tokens: int = 0,
        *,
        on_gone: OnGone | None = None,
    ) -> GenerationStream:
        """Queue `request`. Raises INVALID for a request that can never be served, UNAVAILABLE without an engine. If the
        engine's queue is full, or the wait over `most_wait_s`, the first event of the stream raises OVERLOADED, unless
        the keeper takes the stream elsewhere. While a lost engine is being replaced, requests are queued here, and a
        full queue raises OVERLOADED at once. `num_cached_tokens` of the prompt are thought to be computed already.

        With `on_gone` the request is held here until `send_held`, while another engine computes its prompt. It is
        called where the stream ends or moves before that."""
        if self.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure)
        check_request(request, self.info)
        is_open = self._queue.is_open
        if not is_open:
            check_waiting(len(self._streams), self.info, self.config)
        if current_span.get() is not None:
            request = msgspec.structs.replace(request, returns_timing=True)
        stream = GenerationStream(
            next(self._stream_ids), with_seed(request, self.info), self._cancel, self._relay, self._clock
        )
        stream.was_delayed, stream.most_wait_s = not is_open, most_wait_s
        self._streams[stream.stream_id] = stream
        self._prefills.add(stream.stream_id, len(request.prompt_token_ids) - num_cached_tokens)
        self._watch_deadlines(stream)
        if on_gone is None:
            self._queue.add(stream.stream_id)
            self._send_due()
        else:
            self._held_for_prompts[stream.stream_id] = on_gone
        return stream

    def send_held(self, stream_id: int, source: BlockSource | None, standing: Standing) -> None:
        """Send a request that was held, and say where blocks of its prompt are, if that was computed elsewhere.
        `standing` has whether it may have crashed the engine there. Nothing happens where it is held no more."""
        if self._held_for_prompts.pop(stream_id, None) is not None:
            stream = self._streams[stream_id]
            stream.source, stream.was_delayed = source, True
            self._queue.adopt(stream_id, standing)
            self._send_due()

    @property
    def block_source(self) -> BlockSource | None:
        """Where other engines take blocks of this one from; None where that is not known."""
        return None

    def release(self, stream: GenerationStream) -> Standing:
        """Give up a stream that is open here, for the client of another engine to `adopt`."""
        was_sent = self._queue.is_sent(stream.stream_id)
        is_held = stream.stream_id in self._held_for_prompts
        standing = Standing(is_new=True) if is_held else self._queue.release(stream.stream_id)
        self._forget(stream.stream_id)
        if was_sent and self.is_serving:
            self._send(Cancel(stream.stream_id))
        return standing

    def adopt(self, stream: GenerationStream, standing: Standing) -> None:
        """Go on with a stream of another client, behind its last token and with what is left of its time."""
        stream.move(next(self._stream_ids), self._cancel)
        stream.was_delayed = True
        self._streams[stream.stream_id] = stream
        self._prefills.add(stream.stream_id, len(stream.request.prompt_token_ids) + len(stream.output_token_ids))
        self._watch_deadlines(stream, self._clock() - stream.submitted_at)
        self._queue.adopt(stream.stream_id, standing)
        self._send_due()

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
        return self._clock() - self._last_report

    # -- changes of the engine

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that were given or loaded, by name. A new engine gets the same ones."""
        return self._lora.folders

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load the LoRA adapter in the folder `path`. Raises INVALID for a name that is taken, unless it `replaces`
        that adapter, and the engine's error for one that it does not take; nothing has changed then."""
        async with self._changing:
            if name in self.info.adapters and not replaces:
                raise invalid("lora_name", f"LoRA adapter {name!r} has already been loaded; load_inplace replaces it")
            mark = await asyncio.to_thread(files_mark, Path(path), is_flat=True)  # whatever is in there
            await self._ask_change(LoadAdapter(name, path))
            self.adapters[name], self.adapter_marks[name] = path, mark

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Requests in flight with it end as usual. Raises NOT_FOUND for an unknown name."""
        async with self._changing:
            if name not in (names := self.info.adapters):
                message = f"there is no LoRA adapter {name!r}; loaded: {', '.join(names) or 'none'}"
                raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_name")
            await self._ask_change(UnloadAdapter(name))
            self.adapters.pop(name, None)

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Stop generating; see `Sleep`. Raises the engine's error where it cannot."""
        async with self._changing:
            command = Sleep(level, mode)
            await self._ask_change(command)
            self._last_sleep = command

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Go on, or give memory back to the parts that `tags` name; see `WakeUp`."""
        async with self._changing:
            await self._ask_change(WakeUp(tags))

    async def _ask_change(self, command: ChangeCommand) -> None:
        """Send a command and wait for its answer, or for the loss of the engine. Raises the error that this brings."""
        self._refuse_if_lost()
        answer: asyncio.Future[AdapterOutcome | SleepOutcome] = asyncio.get_running_loop().create_future()
        self._change = getattr(command, "name", ""), answer
        try:
            self._send(command)
            (await answer).check()
        finally:
            self._change = None

    def _take_answer(self, outcome: AdapterOutcome | SleepOutcome) -> bool:
        """Return whether this answers the change under way, which goes on then."""
        if self._change is None or self._change[0] != getattr(outcome, "name", ""):
            return False
        if not self._change[1].done():
            self._change[1].set_result(outcome)
        return True

    def _fail_change(self, reason: str) -> None:
        """End the change under way, if there is one: no answer will come."""
        if self._change is not None and not self._change[1].done():
            self._change[1].set_exception(SluiceError(ErrorCode.UNAVAILABLE, reason))

    def _refuse_if_lost(self) -> None:
        if self.failure is not None or self.is_restarting:
            raise SluiceError(ErrorCode.UNAVAILABLE, self.failure or "the engine is restarting")

    def _restore_engine(self) -> None:
        """Bring a new engine into the state of the lost one: asleep, if that was, and with the adapters that it had."""
        if self.is_sleeping:  # its requests wait in its queue
            self._send(Sleep(self._last_sleep.level, "keep"))
        for command in self._lora.commands_for_new_engine(self.config):
            self._send(command)
        self._info = self._lora.with_missing(self.info)

    async def record_steps(self, seconds: float) -> list[ProfiledStep]:
        """Return the steps of the next `seconds`, with times of this process's perf_counter. One recording at a time;
        an engine that is lost meanwhile has no steps from then on. Raises UNAVAILABLE where it is lost already."""
        self._refuse_if_lost()
        profiles: list[tuple[float, StepProfile]] = []
        self._profiles = profiles
        self._send(Profile(seconds))
        try:
            await asyncio.sleep(seconds + SILENT_S)
        finally:
            self._profiles = None
        # The difference of the two clocks is the least that any frame shows, which travelled fastest.
        offset = min((ahead for ahead, _ in profiles), default=0.0)
        steps = (each for _, profile in profiles for each in profile.steps)
        return [msgspec.structs.replace(each, started=each.started + offset) for each in steps]

    # -- commands

    def _send_due(self) -> None:
        """Send all streams that may go to the engine now."""
        while due := self._queue.take_due():
            if self._queue.probe in due:
                self._send(AskProbe(due[0]))
            else:
                self._submit_to_engine(due)

    def _on_probe_turn(self, stream_id: int) -> None:
        """Submit the probe, for which the engine has nothing else now that could crash it."""
        if stream_id in self._streams:
            self._queue.mark_begun(stream_id)
            self._submit_to_engine((stream_id,))

    def _submit_to_engine(self, stream_ids: Iterable[int]) -> None:
        for stream_id in stream_ids:
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            if stream.request.adapter in self._lora.missing:
                self._lora.hold(stream_id)
                continue
            try:
                request = stream.request_now()
                self._send(Submit(stream_id, request, stream.was_sent, stream.most_wait_s, stream.take_source()))
            except SluiceError as error:
                self._fail(stream_id, error)
                continue
            if stream.was_sent and stream.spans is not None:
                stream.spans.note_resumed()
            self.recoveries.num_resumed += stream.was_sent
            stream.was_sent = True

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
        if (on_gone := self._held_for_prompts.pop(stream_id, None)) is not None:
            on_gone()
        self._prefills.remove(stream_id)
        for timer in self._timers.pop(stream_id, ()):
            timer.cancel()
        return self._streams.pop(stream_id, None)

    # -- reports

    def _on_frame(self, frame: StepFrame) -> None:
        self.stats = frame.stats if self.recoveries.num_restarts == 0 else add_counters(self._stats_before, frame.stats)
        self._last_report = self._clock()
        if frame.profile is not None and self._profiles is not None:
            self._profiles.append((perf_counter() - frame.profile.now, frame.profile))
        for outcome in frame.adapters:
            self._info = self._lora.apply(outcome, self.info, is_answer=self._take_answer(outcome))
            self._submit_to_engine(self._lora.take_held(outcome.name))
        for answer in frame.sleep:
            self.is_sleeping = answer.is_sleeping
            self._take_answer(answer)
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
                self._prefills.remove(event.stream_id)
            stream.push(event)
        for failure in frame.failures:
            stream = self._forget(failure.stream_id)
            if stream is None:
                continue
            refusal = ErrorCode.UNAVAILABLE if frame.stats.is_draining else ErrorCode.OVERLOADED
            if failure.code is refusal and self.keeper is not None:
                self.keeper.on_refused(self.replica, stream, failure)
            else:
                stream.fail(failure.to_error())
        if not self._queue.is_open:
            self._send_due()

    # -- deadlines

    def _watch_deadlines(self, stream: GenerationStream, elapsed_s: float = 0.0) -> None:
        """Start the timers of a request that was submitted `elapsed_s` ago. The engine keeps the deadlines itself; the
        timers are for one that hangs, that is being replaced, or that has not been sent the request yet."""
        request, stream_id = stream.request, stream.stream_id
        if request.timeout_s is not None:
            error = _deadline_error(f"was not complete within its {request.timeout_s:g} s")
            self._call_later(stream_id, request.timeout_s - elapsed_s, self._fail, stream_id, error)
        if request.queue_timeout_s is not None:
            error = _deadline_error(f"waited for longer than its {request.queue_timeout_s:g} s")
            left_s = request.queue_timeout_s - elapsed_s
            self._call_later(stream_id, left_s, self._check_start, stream_id, error, self._clock() + left_s)

    def _call_later(self, stream_id: int, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Call `action` after the delay and the engine's grace, unless the stream has ended by then."""
        timer = asyncio.get_running_loop().call_later(delay_s + GRACE_S, action, *arguments)
        self._timers.setdefault(stream_id, []).append(timer)

    def _check_start(self, stream_id: int, error: SluiceError, deadline: float) -> None:
        """End a stream with `error` that has not begun by the deadline; look again where that is not known yet."""
        stream = self._streams[stream_id]
        is_sent = self._queue.is_sent(stream_id)
        # If the engine has sent a frame since, it would have failed a request that still waited.
        stream.has_started = bool(stream.output_token_ids) or (is_sent and self._last_report > deadline)
        if is_sent and not stream.has_started and self.heartbeat_age_s() < SILENT_S:
            self._call_later(stream_id, 0.0, self._check_start, stream_id, error, deadline)
        elif not stream.has_started:
            self._fail(stream_id, error)

    # -- loss and recovery of the engine

    def _begin_recovery(self) -> None:
        """Stop sending to the lost engine. Frames it has sent may still arrive."""
        self.is_restarting = True
        self._fail_change("the engine was lost while it changed its LoRA adapters, fell asleep or woke")
        self._lora.lose_engine()
        self._queue.close()
        for stream in self._streams.values():
            stream.was_delayed = True
            if stream.spans is not None and stream.was_sent:
                stream.spans.note_lost()

    def _requeue_streams(self) -> bool:
        """Queue the lost engine's streams for the next one. Returns whether some are abandoned as the cause."""
        self.stats = self._stats_before = without_gauges(self.stats)
        abandoned = self._queue.requeue_after_crash()
        for stream_id in abandoned.poisonous:
            self._abandon(stream_id, "this request crashed the engine twice")
        for stream_id in abandoned.exhausted:
            self._abandon(stream_id, f"the engine crashed {MAX_SHARED_CRASHES} times while it worked on this request")
        self.recoveries.num_poisoned += len(abandoned.poisonous)
        if self.keeper is not None:
            self.keeper.on_lost(self.replica)
        return bool(abandoned.poisonous or abandoned.exhausted)

    def _abandon(self, stream_id: int, message: str) -> None:
        id_ = self._streams[stream_id].request.request_id
        log.error("request %s is not tried again: %s", id_, message, extra=about(id_))
        self._fail(stream_id, SluiceError(ErrorCode.INTERNAL, message))

    def _end_recovery(self, recovery_s: float) -> None:
        """Send the queued streams to the new engine, which was ready `recovery_s` after the loss was detected."""
        self._last_report = self._clock()
        self.is_restarting = False
        self._restore_engine()
        self.recoveries.note(recovery_s)
        self._queue.open()
        self._send_due()
        if self.keeper is not None:
            self.keeper.on_back(self.replica)

    def _die(self, reason: str) -> None:
        """Fail all streams, because there will be no engine any more."""
        if self.failure is not None:
            return
        self.failure = reason
        self.is_restarting = False
        self._fail_change(reason)
        if self.keeper is not None:
            self.keeper.on_lost(self.replica)
        for stream_id, stream in list(self._streams.items()):
            self._forget(stream_id)
            stream.fail(SluiceError(ErrorCode.UNAVAILABLE, reason))


def _deadline_error(problem: str) -> SluiceError:
    return SluiceError(ErrorCode.DEADLINE, f"the request {problem}")
