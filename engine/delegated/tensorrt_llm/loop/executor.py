"""The adapter's loop: commands in, frames of token events out, as `engine.loop.executor.InflightExecutor` does it."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from engine.config import EngineConfig, SchedulerPolicy
from engine.delegated.tensorrt_llm.loop.admission import Capacity, num_started, to_hand_over
from engine.delegated.tensorrt_llm.loop.books import Books
from engine.delegated.tensorrt_llm.loop.events import News
from engine.delegated.tensorrt_llm.loop.failures import EngineLost
from engine.delegated.tensorrt_llm.loop.following import follow
from engine.delegated.tensorrt_llm.loop.inside import Inside
from engine.delegated.tensorrt_llm.loop.llm import Llm
from engine.delegated.tensorrt_llm.loop.probe import one_token
from engine.delegated.tensorrt_llm.loop.sequence import LlmSequence, blocks_to_completion
from engine.delegated.tensorrt_llm.loop.watch import STALL_SETTING, Progress, check_health, stall_timeout_s
from engine.frames import Cancel, Command, Shutdown, StepFrame, Submit, request_failed
from engine.scheduling.admission import AdmissionController, deadline_error
from engine.scheduling.queue import DeadlineHeap
from engine.types import EngineInfo, EngineStats, FinishReason, IterationStats, RequestFailed, TokenEvent
from engine.validation import check_request
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
"""An idle engine speaks at least this often; a silent one hangs."""
CHARGED_TOKENS = 16
"""Output is laid to a tenant's account in such pieces."""
MAX_COMMANDS = 32
"""Commands obeyed in one turn of the loop, so that a burst of them does not hold up those who decode."""


class TensorRtLlmExecutor:
    """Serves one LLM on an event loop: queue, priorities, fair shares, deadlines and admission are ours, batching, KV
    cache and sampling are TensorRT-LLM's. All methods are called on that loop.
    """

    def __init__(
        self,
        llm: Llm,
        info: EngineInfo,
        config: EngineConfig,
        emit: Callable[[StepFrame], None],
        clock: Callable[[], float] = perf_counter,
        iteration: IterationStats | None = None,
    ) -> None:
        """`iteration`: what `llm` has told of one that ran already."""
        self.info = info
        self._llm = llm
        self._emit = emit
        self._clock = clock
        self._capacity = Capacity(info.max_num_seqs, info.num_blocks, SchedulerPolicy(info.scheduler_policy))
        self._reception: AdmissionController[LlmSequence] = AdmissionController(info, config)
        self._books = Books(info, self._reception.forecast, iteration, clock())
        self._progress = Progress(stall_timeout_s(config.runtime_settings), clock())
        self._inside = Inside(llm, self, clock)
        self._deadlines = DeadlineHeap()
        """Of those inside; those that wait are watched by the queue."""
        self._inbox: deque[Command] = deque()
        self._events: list[TokenEvent] = []
        self._failures: list[RequestFailed] = []
        self._has_left = False
        """Whether places came free that nobody was told of."""
        self._turn: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._last_emit = 0.0
        self._predicted_wait_s = self._last_prediction = 0.0
        self._is_busy = asyncio.Event()
        self._probe: asyncio.Task[None] | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until a Shutdown command. Raises EngineLost where TensorRT-LLM cannot go on."""
        services = [self._beat(), follow(self._llm.statistics, self._take_iteration, self._is_busy, "statistics")]
        if self._llm.has_kv_cache_events:
            observe = self._books.cached_blocks.observe
            services.append(follow(self._llm.kv_cache_events, observe, self._is_busy, "KV-cache events"))
        tasks = [asyncio.create_task(service) for service in services]
        try:
            await asyncio.wait((self._end, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for each in (self._end, *tasks):
                if each.done():
                    each.result()
        finally:
            self._flush()
            tasks += [self._probe] if self._probe is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, self._inside.close(), return_exceptions=True)

    def obey(self, commands: list[Command]) -> None:
        """Not at once, but soon, and in order."""
        self._inbox.extend(commands)
        self._turn_soon()

    def stats(self) -> EngineStats:
        queue, forecast, inside = self._reception.queue, self._reception.forecast, self._inside.sequences
        started = num_started(inside, self._capacity)
        used = self._books.blocks_used(inside)
        return EngineStats(
            num_running=started,
            num_waiting=len(queue) + len(inside) - started,
            num_blocks_used=used,
            num_blocks_free=self.info.num_blocks - used,
            num_blocks_reserved=self.info.num_blocks - self._free_blocks,
            num_blocks_cached=min(len(self._books.cached_blocks), self.info.num_blocks - used),
            num_tokens_waiting=queue.num_tokens,
            predicted_wait_s=self._predicted_wait_s,
            waits_total=forecast.waits_total,
            wait_seconds_total=forecast.wait_seconds_total,
            wait_error_seconds_total=forecast.wait_error_seconds_total,
            iteration=self._books.iteration,
            **self._books.counters.totals(),  # type: ignore[arg-type]
        )

    # -- one turn: commands, times, who goes in, what is told

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
        for _ in range(min(len(self._inbox), MAX_COMMANDS)):
            self._obey(self._inbox.popleft())
        self._expire()
        self._hand_over()
        self._set_alarm()
        if self._events or self._failures or self._has_left:
            self._flush()
        if self._inbox:
            self._turn_soon()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command.stream_id)
            case Shutdown():
                for sequence in [*self._inside.sequences, *self._reception.queue]:
                    self._cancel(sequence.stream_id)
                if not self._end.done():
                    self._end.set_result(None)

    def _submit(self, command: Submit) -> None:
        try:
            self._reception.queue.add(self._sequence(command))
        except SluiceError as error:
            self._failures.append(request_failed(command.stream_id, error))
        except Exception:
            log.exception("request %s cannot be put to TensorRT-LLM", command.request.request_id)
            unforeseen = SluiceError(ErrorCode.INTERNAL, "the engine failed to prepare this request; its log says why")
            self._failures.append(request_failed(command.stream_id, unforeseen))

    def _sequence(self, command: Submit) -> LlmSequence:
        """Raises SluiceError for what cannot be served, or cannot wait."""
        request, params = command.request, command.request.sampling
        check_request(request, self.info)
        num_prompt, size = len(request.prompt_token_ids), self.info.block_size
        num_blocks = blocks_to_completion(num_prompt, params.max_tokens, params.beam_width, size)
        self._check_fits(num_blocks)
        call = self._llm.prepare(request)
        wait_s = self._reception.check_admission(command, num_blocks, self._inside.sequences, self._free_blocks)
        return LlmSequence(command.stream_id, request, self.info, call, self._clock(), wait_s)

    def _check_fits(self, num_blocks: int) -> None:
        """By TensorRT-LLM's own count, which is above ours: what exceeds it would wait for ever, and all behind it."""
        if num_blocks > self.info.num_blocks:
            raise invalid(
                "max_tokens",
                f"the request needs up to {num_blocks} blocks of {self.info.block_size} tokens, but the whole KV cache "
                f"has {self.info.num_blocks}; lower max_tokens",
            )

    @property
    def _free_blocks(self) -> int:
        """Those not reserved by who is inside; none where some wait in there."""
        reserved = sum(self._capacity.blocks_of(each) for each in self._inside.sequences)
        return max(self.info.num_blocks - reserved, 0)

    def _cancel(self, stream_id: int) -> None:
        sequence = self._inside.get(stream_id) or self._reception.queue.get(stream_id)
        if sequence is None or sequence.is_told:
            return
        if sequence.is_inside:  # a stop string ends it so: the place comes free as at any end
            self._reception.forecast.observe_end(sequence.max_tokens, sequence.num_output)
        self._events.append(TokenEvent(stream_id, [], FinishReason.CANCELLED))
        self._dismiss(sequence)

    def _expire(self) -> None:
        """Answer those whose time is over."""
        now = self._clock()
        inside = [self._inside.get(stream_id) for stream_id in self._deadlines.take_due(now)]
        for sequence in (*self._reception.queue.expired(now), *inside):
            if sequence is not None:
                self._books.counters.timeouts += 1
                self.on_failure(sequence, deadline_error(sequence, now))

    def _set_alarm(self) -> None:
        due = min(self._reception.queue.next_expiry(), self._deadlines.next())
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

    def _hand_over(self) -> None:
        queue, now = self._reception.queue, self._clock()
        if not queue or self._end.done():  # those who wait as TensorRT-LLM is lost go on in the next engine
            return
        for sequence in to_hand_over(queue, self._inside.sequences, self._capacity):
            if not self._inside:
                self._progress.made(now)
                self._books.begin(now)
                self._is_busy.set()
            queue.admit(sequence)
            sequence.is_inside = True
            self._reception.forecast.record_wait(sequence.predicted_wait_s, now - sequence.submitted_at)
            self._deadlines.add(sequence.stream_id, sequence.deadline)
            self._inside.start(sequence)

    def _flush(self) -> None:
        """Send what happened; without news it is a heartbeat."""
        now = self._clock()
        if now - self._last_prediction >= HEARTBEAT_S:
            self._last_prediction = now
            self._predicted_wait_s = self._reception.predict_wait(self._inside.sequences, self._free_blocks)
        frame = StepFrame(self._events, self._failures, self.stats())
        self._events, self._failures, self._has_left = [], [], False
        self._last_emit = now
        self._emit(frame)

    # -- what those inside bring

    def on_response(self) -> None:
        self._progress.made(self._clock())

    def on_news(self, sequence: LlmSequence, news: News) -> None:
        if news.token_ids:
            self._books.take_tokens(sequence, len(news.token_ids), self._clock())
            sequence.num_output += len(news.token_ids)
            self._charge(sequence, CHARGED_TOKENS)
        if news.detail is not None and news.detail.num_cached_tokens is not None:
            self._books.take_prompt(sequence, news.detail.num_cached_tokens)
        self._events.append(TokenEvent(sequence.stream_id, news.token_ids, news.finish_reason, news.detail))
        if news.finish_reason is not None:
            sequence.is_told = True
            self._deadlines.discard(sequence.stream_id)
            self._reception.forecast.observe_end(sequence.max_tokens, sequence.num_output)
        self._turn_soon()

    def on_failure(self, sequence: LlmSequence, error: SluiceError) -> None:
        if not sequence.is_told:
            self._failures.append(request_failed(sequence.stream_id, error))
            self._dismiss(sequence)

    def on_left(self, sequence: LlmSequence) -> None:
        self._charge(sequence, 1)
        if sequence.has_begun and not sequence.is_prompt_counted:
            self._books.take_prompt(sequence, 0)
        self._reception.queue.remove(sequence.stream_id)
        self._deadlines.discard(sequence.stream_id)
        if not self._inside:
            self._books.rest()
            self._is_busy.clear()
        self._has_left = True
        self._turn_soon()

    def on_lost(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(EngineLost(f"TensorRT-LLM cannot go on: {error}"))

    def _charge(self, sequence: LlmSequence, at_least: int) -> None:
        """Lay the output since the last time to its tenant's account."""
        fresh = sequence.num_output - sequence.num_charged
        if fresh >= at_least:
            self._reception.queue.charge(sequence, fresh)
            sequence.num_charged = sequence.num_output

    def _dismiss(self, sequence: LlmSequence) -> None:
        """Its client hears no more of it. Where TensorRT-LLM has it, it stays until that has let it go."""
        sequence.is_told = True
        self._deadlines.discard(sequence.stream_id)
        if sequence.is_inside:
            self._inside.abort(sequence)
        else:
            self._reception.queue.remove(sequence.stream_id)
        self._turn_soon()

    # -- beside the requests

    async def _beat(self) -> None:
        """Heartbeats, and whether there is still a heart. Raises EngineLost."""
        while True:
            now = self._clock()
            if now - self._last_emit >= HEARTBEAT_S:
                self._flush()
            check_health(self._llm)
            if self._inside.forget_lost(now) and self._probe is None:
                self._probe = asyncio.create_task(self._prove(), name="probe")
            if self._can_stall:
                self._progress.check(now)
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def _prove(self) -> None:
        """A token within the time that no token may take, or the engine is lost."""
        try:
            await one_token(self._llm, self.info, "probe", self._progress.timeout_s)
        except TimeoutError:
            self.on_lost(RuntimeError(f"an aborted request did not end, and no token came in {STALL_SETTING}"))
        except Exception as error:
            self.on_lost(error)
        self._probe = None

    @property
    def _can_stall(self) -> bool:
        """Whether something is due. A beam search shows nothing before its end but iterations."""
        has_iterations = self._books.has_iterations(self._clock())
        awaited = (each for each in self._inside.sequences if not each.is_told)
        return any(has_iterations or each.request.sampling.beam_width == 1 for each in awaited)

    def _take_iteration(self, told: Mapping[str, Any]) -> None:
        now = self._clock()
        self._progress.made(now)
        self._books.take_iteration(told, now)
