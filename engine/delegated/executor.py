"""The executor of a runtime that batches by itself: commands in, frames of token events out."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.admission import BlockSharing, RuntimeCapacity, RuntimeGate
from sluice.engine.delegated.changes import RuntimeChanges
from sluice.engine.delegated.in_flight import InFlightListener, InFlightTable
from sluice.engine.delegated.interface import DelegatedRuntime, EngineLost, Iteration, ResponseDelta
from sluice.engine.delegated.sequence import DelegatedSequence, Rendered, Renderings, make_sequence
from sluice.engine.delegated.statistics import StatisticsRecorder
from sluice.engine.delegated.watchdog import Watchdog, stall_timeout_s
from sluice.engine.frames import (
    AskView,
    Cancel,
    Command,
    EngineView,
    LoadAdapter,
    Profile,
    Shutdown,
    Sleep,
    StepFrame,
    Submit,
    UnloadAdapter,
    WakeUp,
    request_failed,
)
from sluice.engine.scheduling.admission import (
    CHARGED_TOKENS,
    HEARTBEAT_S,
    MAX_COMMANDS,
    AdmissionController,
    Backlog,
    deadline_error,
)
from sluice.engine.scheduling.planner import find_policy
from sluice.engine.scheduling.queue import DeadlineHeap
from sluice.engine.statistics import EngineStats, IterationStats
from sluice.engine.types import (
    EngineInfo,
    EventDetail,
    FinishReason,
    RequestFailed,
    SequenceMetrics,
    SequenceTiming,
    TokenEvent,
)
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import about

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 1 << 17
"""Tokens of prompts after which a turn takes no more commands, since the blocks of each prompt are hashed."""


class DelegatedExecutor(InFlightListener):
    """Serves one runtime on an event loop: queue, priorities, fair shares, deadlines and admission are ours, batching,
    KV cache and sampling are the runtime's. All methods are called on that loop."""

    def __init__(
        self,
        runtime: DelegatedRuntime,
        info: EngineInfo,
        config: EngineConfig,
        emit: Callable[[StepFrame], None],
        clock: Callable[[], float] = perf_counter,
        iteration: IterationStats | None = None,
    ) -> None:
        """`info` and `iteration` are what `runtime.start` returned."""
        self.info = info
        self._runtime = runtime
        self._emit = emit
        self._clock = clock
        policy = find_policy(info.scheduler_policy)
        # The requests of a static batch begin together: none waits for a block that another one computes.
        sharing = runtime.sharing if policy.is_in_flight else BlockSharing.NONE
        log.info("%s: %s", runtime.title, sharing.value)
        self._capacity = RuntimeCapacity(
            info.max_num_seqs, info.num_blocks, policy, takes_early=runtime.takes_early, sharing=sharing
        )
        self._gate: RuntimeGate[DelegatedSequence] = RuntimeGate(self._capacity)
        self._renderings = Renderings(runtime, config, clock, self._on_rendered)
        self._admission: AdmissionController[DelegatedSequence] = AdmissionController(info, config, clock)
        self._recorder = StatisticsRecorder(info, self._admission.forecast, iteration, clock())
        self._prefixes = runtime.prefixes
        self._in_flight = InFlightTable(runtime, self, clock)
        timeout_s = stall_timeout_s(config.runtime_settings)
        self._watchdog = Watchdog(runtime, info, self._in_flight, self._recorder.has_iterations, clock, timeout_s)
        self._deadlines = DeadlineHeap()
        """Deadlines of the requests in flight; the queue watches those that wait."""
        self._inbox: deque[Command] = deque()
        self._events: list[TokenEvent] = []
        self._failures: list[RequestFailed] = []
        self._changes = RuntimeChanges(runtime, info.adapters, self._on_change, self._abort_running)
        self._has_freed_places = False
        """Whether places came free since the last frame."""
        self._turn: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._last_emit = 0.0
        self._profile_until = 0.0
        """The time until which iterations are told of."""
        self._is_busy = asyncio.Event()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until a Shutdown command. Raises EngineLost where the runtime cannot go on."""
        services = (self._beat(), self._watchdog.run(), self._runtime.observe(self._on_iteration, self._is_busy))
        tasks = [asyncio.create_task(service) for service in services]
        try:
            await asyncio.wait((self._end, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for each in (self._end, *tasks):
                if each.done():
                    each.result()
        finally:
            self._flush()
            for task in (*tasks, *self._renderings.tasks.values()):
                task.cancel()
            await asyncio.gather(*tasks, self._in_flight.close(), return_exceptions=True)

    def obey(self, commands: list[Command]) -> None:
        """Take commands, to be obeyed soon and in order."""
        self._inbox.extend(commands)
        self._turn_soon()

    def stats(self) -> EngineStats:
        queue, in_flight = self._admission.queue, self._in_flight.sequences
        started = self._gate.num_started(in_flight)
        used = self._recorder.blocks_used(in_flight)
        return EngineStats(
            num_running=started,
            num_waiting=len(self._renderings.tasks) + len(queue) + len(in_flight) - started,
            num_blocks_used=used,
            num_blocks_free=self.info.num_blocks - used,
            num_blocks_reserved=self.info.num_blocks - self._count_free_blocks(),
            num_blocks_cached=min(len(self._prefixes or ()), self.info.num_blocks - used),
            **self._admission.stats(started),
            iteration=self._recorder.iteration,
            histograms=self._recorder.histograms(),
            handover=self._runtime.handover_stats(),
            **self._recorder.counters.totals(),  # type: ignore[arg-type]
        )

    def view(self, question: AskView) -> EngineView:
        """Answer who watches."""
        return self._recorder.view(question)

    # -- one turn: obey commands, check deadlines, admit, emit

    def _turn_soon(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """An exception that is no request's own ends the engine: nobody would be served any more."""
        try:
            self._do_turn()
        except Exception as error:
            if not self._end.done():
                self._end.set_exception(error)

    def _do_turn(self) -> None:
        self._turn = None
        num_tokens = 0
        for _ in range(min(len(self._inbox), MAX_COMMANDS)):
            command = self._inbox.popleft()
            self._obey(command)
            num_tokens += len(command.request.prompt_token_ids) if isinstance(command, Submit) else 0
            if num_tokens >= MAX_PROMPT_TOKENS:
                break
        self._expire()
        self._admit()
        self._admission.note_admitted(())
        self._set_alarm()
        if self._events or self._failures or self._has_freed_places:
            self._flush()
        if self._inbox:
            self._turn_soon()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command.stream_id)
            case Profile(seconds):
                self._profile_until = self._clock() + seconds
            case Sleep() | WakeUp() | LoadAdapter() | UnloadAdapter():
                self._admit()  # what came before a sleep still starts
                self._changes.begin(command)
            case Shutdown():
                queued = [each.stream_id for each in (*self._in_flight.sequences, *self._admission.queue)]
                for stream_id in [*queued, *self._renderings.tasks]:
                    self._cancel(stream_id)
                if not self._end.done():
                    self._end.set_result(None)

    def _on_change(self) -> None:
        """The runtime falls asleep, or has changed."""
        self.info = msgspec.structs.replace(self.info, adapters=self._changes.adapters)
        self._watchdog.is_paused = self._changes.is_frozen
        self._watchdog.note_progress()
        self._flush()
        self._turn_soon()

    def _abort_running(self) -> None:
        """End what the runtime has, as it falls asleep."""
        for sequence in list(self._in_flight.sequences):
            self.on_failure(sequence, SluiceError(ErrorCode.UNAVAILABLE, "the engine was put to sleep; try again"))

    def _submit(self, command: Submit, rendered: Rendered | None = None) -> None:
        try:
            if rendered is None and command.request.images:
                self._renderings.start(command, self.info, self.stats())
            else:
                self._queue(command, rendered)
        except SluiceError as error:
            self._failures.append(request_failed(command.stream_id, error))
        except Exception:
            id_ = command.request.request_id
            log.exception("request %s cannot be put to %s", id_, self._runtime.title, extra=about(id_))
            unforeseen = SluiceError(ErrorCode.INTERNAL, "the engine failed to prepare this request; its log says why")
            self._failures.append(request_failed(command.stream_id, unforeseen))

    def _on_rendered(self, command: Submit, rendered: Rendered | SluiceError) -> None:
        if isinstance(rendered, SluiceError):
            self._failures.append(request_failed(command.stream_id, rendered))
        else:
            self._submit(command, rendered)
        self._turn_soon()

    def _queue(self, command: Submit, rendered: Rendered | None) -> None:
        """Raises SluiceError for a request that cannot be served, or cannot wait."""
        sequence = make_sequence(command, rendered, self._runtime, self.info, self._clock())
        self._admission.admit_to_queue(
            sequence,
            self._in_flight.sequences,
            self._count_free_blocks(),
            self._clock(),
            backlog=self._backlog(),
            was_accepted=command.was_accepted,
            most_wait_s=command.most_wait_s,
        )
        self._admission.queue.add(sequence)

    def _backlog(self) -> Backlog[DelegatedSequence]:
        """Return what waits, in the runtime and before it. Requests whose images are prepared take free places."""
        in_flight, num_rendering = self._in_flight.sequences, len(self._renderings.tasks)
        started = self._gate.num_started(in_flight)
        num_places = self._capacity.max_num_seqs - started

        def count_started(queue: Iterable[DelegatedSequence]) -> int:
            is_open = self._capacity.policy.is_in_flight or not in_flight
            starting = self._gate.num_starting(in_flight, queue)
            return starting + (min(num_rendering, num_places - starting) if is_open else 0)

        num_waiting = num_rendering + len(self._admission.queue) + len(in_flight) - started
        return Backlog(num_waiting, num_places, count_started)

    def _count_free_blocks(self) -> int:
        """Return the blocks not reserved by requests in flight; none where some of those wait in the runtime."""
        return max(self.info.num_blocks - self._gate.reserved_blocks(self._in_flight.sequences), 0)

    def _cancel(self, stream_id: int) -> None:
        sequence = self._in_flight.get(stream_id) or self._admission.queue.get(stream_id)
        if sequence is None or sequence.is_answered:
            if self._renderings.cancel(stream_id):
                self._events.append(TokenEvent(stream_id, [], FinishReason.CANCELLED))
            return
        if sequence.is_in_flight:  # a stop string ends it so: the place comes free as at any end
            self._admission.forecast.observe_end(sequence, is_cancelled=True)
        else:
            self._admission.forecast.observe_leaving(sequence, self._clock() - sequence.submitted_at)
        self._events.append(TokenEvent(stream_id, [], FinishReason.CANCELLED))
        self._dismiss(sequence)

    def _expire(self) -> None:
        """Fail the requests that are past their deadline."""
        now = self._clock()
        in_flight = [self._in_flight.get(stream_id) for stream_id in self._deadlines.take_due(now)]
        for sequence in (*self._admission.queue.expired(now), *in_flight):
            if sequence is not None:
                self._recorder.counters.timeouts += 1
                self.on_failure(sequence, deadline_error(sequence, now))

    def _set_alarm(self) -> None:
        due = min(self._admission.queue.next_expiry(), self._deadlines.next())
        if due == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = None, due
        if due != math.inf:
            self._alarm = asyncio.get_running_loop().call_later(max(due - self._clock(), 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        self._turn_soon()

    def _admit(self) -> None:
        """Hand waiting requests to the runtime."""
        queue, now = self._admission.queue, self._clock()
        # Those that wait as the runtime is lost go on in the next engine.
        if not queue or self._changes.holds_requests or self._end.done():
            return
        for sequence in self._gate.choose(queue, self._in_flight.sequences):
            if not self._in_flight:
                self._watchdog.note_progress()
                self._recorder.on_busy(now)
                self._is_busy.set()
            queue.admit(sequence)
            sequence.is_in_flight = True
            sequence.queue_s = now - sequence.submitted_at
            self._admission.forecast.record_wait(sequence, sequence.queue_s)
            self._recorder.record_wait(sequence.queue_s)
            self._deadlines.add(sequence.stream_id, sequence.deadline)
            if self._prefixes is not None:
                self._prefixes.hand_over(sequence.stream_id, sequence.request.prompt_token_ids, sequence.owner)
            self._in_flight.submit(sequence)

    def _flush(self) -> None:
        """Send what happened since the last frame; without events the frame is a heartbeat."""
        now = self._clock()
        self._admission.update_prediction(self._in_flight.sequences, self._count_free_blocks, now)
        stats = self.stats()
        profile = self._recorder.profile(stats, now) if now < self._profile_until else None
        frame = StepFrame(self._events, self._failures, stats, *self._changes.take_outcomes(), profile=profile)
        self._events, self._failures = [], []
        self._has_freed_places = False
        self._last_emit = now
        self._emit(frame)

    async def _beat(self) -> None:
        while True:
            if self._clock() - self._last_emit >= HEARTBEAT_S:
                self._flush()
            await asyncio.sleep(HEARTBEAT_S / 2)

    # -- what the requests in flight bring

    def on_response(self) -> None:
        self._watchdog.note_progress()

    def on_delta(self, sequence: DelegatedSequence, delta: ResponseDelta) -> None:
        detail = delta.detail
        if sequence.request.returns_timing and not sequence.has_begun:
            timing = SequenceTiming(self._clock() - sequence.submitted_at, sequence.queue_s)
            detail = msgspec.structs.replace(detail or EventDetail(), timing=timing)
        if sequence.has_images and not sequence.has_begun:
            detail = msgspec.structs.replace(detail or EventDetail(), num_prompt_tokens=sequence.num_prompt)
        if delta.token_ids:
            self._recorder.record_output(sequence, len(delta.token_ids), self._clock())
            is_first = not sequence.has_begun
            sequence.num_output += len(delta.token_ids)
            if is_first:
                self._gate.shared.begin(sequence)
            self._charge(sequence, CHARGED_TOKENS)
        if delta.detail is not None and delta.detail.num_cached_tokens is not None:
            self._recorder.record_prompt(sequence, delta.detail.num_cached_tokens)
        if sequence.request.returns_metrics:
            detail = msgspec.structs.replace(detail or EventDetail(), metrics=SequenceMetrics(sequence.queue_s))
        self._events.append(TokenEvent(sequence.stream_id, delta.token_ids, delta.finish_reason, detail))
        if delta.finish_reason is not None:
            sequence.is_answered = True
            self._deadlines.discard(sequence.stream_id)
            self._admission.forecast.observe_end(sequence)
        self._turn_soon()

    def on_failure(self, sequence: DelegatedSequence, error: SluiceError) -> None:
        if not sequence.is_answered:
            self._failures.append(request_failed(sequence.stream_id, error))
            self._dismiss(sequence)

    def on_removed(self, sequence: DelegatedSequence) -> None:
        self._gate.shared.remove(sequence)
        if self._prefixes is not None:
            self._prefixes.end(sequence.stream_id)
        self._charge(sequence, 1)
        if sequence.has_begun and not sequence.is_prompt_counted:
            self._recorder.record_prompt(sequence, 0)
        self._admission.queue.remove(sequence.stream_id)
        self._deadlines.discard(sequence.stream_id)
        if not self._in_flight:
            self._gate.shared.check_empty()
            self._recorder.on_idle()
            self._is_busy.clear()
        self._has_freed_places = True
        self._turn_soon()

    def on_lost(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(EngineLost(f"{self._runtime.title} cannot go on: {error}"))

    def _charge(self, sequence: DelegatedSequence, at_least: int) -> None:
        if fresh := self._admission.charge_output(sequence, at_least):
            self._recorder.record_tokens(sequence.tenant, 0, fresh)

    def _dismiss(self, sequence: DelegatedSequence) -> None:
        """Send the client no more of a sequence. One in flight stays in the table until the runtime has ended it."""
        sequence.is_answered = True
        self._deadlines.discard(sequence.stream_id)
        if sequence.is_in_flight:
            self._in_flight.abort(sequence)
        else:
            self._admission.queue.remove(sequence.stream_id)
        self._turn_soon()

    # -- what the runtime's statistics bring

    def _on_iteration(self, iteration: Iteration) -> None:
        self._watchdog.note_progress()
        self._recorder.record_iteration(iteration, self._clock())
