"""Admission control, in front of every executor: whether a request may wait, in which order, for how long, and when one
that was refused is to come back."""

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable
from heapq import heappop, heappush
from typing import Any, Generic, NamedTuple

from sluice.engine.config import EngineConfig
from sluice.engine.forecast.wait import EngineState, WaitForecast, WaitPrediction
from sluice.engine.scheduling.fair_share import Q
from sluice.engine.scheduling.queue import WaitingQueue
from sluice.engine.sequence import QueuedSequence
from sluice.engine.statistics import EngineStats
from sluice.engine.types import BACKGROUND_PRIORITY, EngineInfo, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

EARLY_S = 0.25
"""A request that comes back so much before its time is taken for punctual."""
LATE_S, LATE_SHARE = 2.0, 0.1
"""A place is kept for so long after its time, in seconds and as a share of the time until then."""
MAX_PROMISES = 4096
RETURN_RATE = 1.0 / 32
"""Weight of the latest promise in the share of requests that come back."""


class PromisedPlaces:
    """The requests that were refused and told when to come back, each known by a key. They stand in line: who is
    refused later is told a later time, and one that comes too early keeps its time. Those that do not come back
    count less and less."""

    def __init__(self) -> None:
        self._due_of: dict[int, list[float]] = {}
        self._due: list[float] = []
        self._ends: list[tuple[float, int, float]] = []
        """When each place is given up, its key and its time; a heap with those of places that were taken too."""
        self._return_share = 1.0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: int, now: float, wait_s: float) -> None:
        """Keep a place for a request that comes back in `wait_s`."""
        if len(self._due) >= MAX_PROMISES:
            return
        due = now + wait_s
        insort(self._due_of.setdefault(key, []), due)
        insort(self._due, due)
        heappush(self._ends, (due + max(LATE_S, LATE_SHARE * wait_s), key, due))

    def due_of(self, key: int) -> float | None:
        """Return when the request was told to come back; None if it was not."""
        times = self._due_of.get(key)
        return times[0] if times else None

    def take(self, key: int) -> None:
        """Give the request its place, as it is back."""
        self._remove(key, self._due_of[key][0])
        self._return_share += RETURN_RATE * (1.0 - self._return_share)

    def expire(self, now: float) -> None:
        """Give up the places of those that have not come back."""
        while self._ends and self._ends[0][0] <= now:
            _, key, due = heappop(self._ends)
            if due in self._due_of.get(key, ()):
                self._remove(key, due)
                self._return_share -= RETURN_RATE * self._return_share

    def num_expected(self, until: float = math.inf) -> int:
        """Return how many are expected back by then."""
        return round(self._return_share * bisect_right(self._due, until))

    def _remove(self, key: int, due: float) -> None:
        times = self._due_of[key]
        times.remove(due)
        if not times:
            del self._due_of[key]
        del self._due[bisect_right(self._due, due) - 1]


HEARTBEAT_S = 0.5
"""An idle engine sends a frame at least this often, so that a silent one can be recognized as hanging."""
MAX_COMMANDS = 32
"""Most commands that an executor obeys at once, so that a burst of them does not hold up the requests that decode; a
submit takes about a tenth of a millisecond."""
CHARGED_TOKENS = 16
"""Output is charged to its tenant in pieces of this size: one by one it would take a tenth of a step's own time."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 3600.0
"""Bounds of `Retry-After`: no client hammers a full queue, and none stays away for ever on a mere forecast."""
MAX_COLD_RETRY_AFTER_S = 60.0
"""The same while the forecast has observed little."""
SLOW_SHARE = 1.15
"""How much longer than predicted it may take until a place in the queue is free."""


class Backlog(NamedTuple, Generic[Q]):
    """The requests that wait in an executor, in its queue and elsewhere, and what it has room for."""

    num_waiting: int
    num_places: int
    """Sequences that may start before `max_num_seqs` run."""
    count_started: Callable[[Iterable[Q]], int]
    """Returns how many of all that wait the next step takes, if these are the queue, in order."""


class AdmissionController(Generic[Q]):
    """The waiting queue and the wait forecast of one engine. Used by one thread."""

    def __init__(self, info: EngineInfo, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._info = info
        self._config = config
        self.queue: WaitingQueue[Q] = WaitingQueue(config.tenant_weights)
        self.forecast = WaitForecast(info, clock, is_chunk_chosen=config.chooses_chunk)
        self.promised = PromisedPlaces()
        self._num_foreground_waiting = 0
        self._predicted_wait_s = self._last_prediction = 0.0

    def admit_to_queue(
        self,
        sequence: Q,
        running: Collection[QueuedSequence],
        free_blocks: int,
        now: float,
        *,
        backlog: Backlog[Q],
        was_accepted: bool,
        most_wait_s: float | None = None,
    ) -> None:
        """Check whether the new sequence may wait, and set what is expected of it. `free_blocks` is how many blocks no
        running sequence reserves. Raises OVERLOADED if the queue is full or the predicted wait over `most_wait_s`,
        DEADLINE if the wait would be too long; never for a request that a lost engine had accepted (`was_accepted`)."""
        state = EngineState(running, self.queue, free_blocks, now)
        prediction = self.forecast.predict(sequence, state)
        if not was_accepted:
            self._check_queue(sequence, backlog, prediction, state)
            if most_wait_s is not None and prediction.wait_s > most_wait_s:
                raise _wait_too_long(most_wait_s, prediction)
        self.queue.arrivals.observe(sequence.priority, sequence.tenant, now)
        sequence.predicted_wait_s, sequence.predicted_deviation_s = prediction.wait_s, prediction.deviation_s

    def _check_queue(self, sequence: Q, backlog: Backlog[Q], prediction: WaitPrediction, state: EngineState) -> None:
        """Raise OVERLOADED if the queue is full, DEADLINE if the wait would be too long. A place in the queue that was
        promised is kept for the request that comes back for it."""
        self.promised.expire(state.now)
        key = _request_key(sequence.request) if self.promised else None
        due = None if key is None else self.promised.due_of(key)
        is_back = due is not None and due <= state.now + EARLY_S
        num_promised = 0 if is_back else self.promised.num_expected(state.now + prediction.wait_s)
        waiting = WaitingLoad(
            backlog.num_waiting,
            self.queue.num_tokens,
            backlog.num_places,
            lambda: backlog.num_waiting + 1 - self._count_started(sequence, backlog),
            num_promised,
        )
        excess = find_excess(sequence.request, waiting, self._config)
        if key is not None and (is_back or (due is not None and excess is None)):
            self.promised.take(key)
        if excess is not None:
            raise _queue_full(excess, prediction, self._promise(sequence, backlog, state, is_back=is_back))
        if prediction.is_warm:
            check_deadlines(sequence.request, prediction)

    def _promise(self, sequence: Q, backlog: Backlog[Q], state: EngineState, *, is_back: bool) -> float:
        """Return in how many seconds there will be a place in the queue, which is kept until then. One that came too
        early is told the same time again, and one that is back goes before those that are not due yet."""
        key = _request_key(sequence.request)
        due = self.promised.due_of(key)
        if due is not None and not is_back:
            return max(due - state.now, MIN_RETRY_AFTER_S)
        num_promised = self.promised.num_expected(state.now if is_back else math.inf)
        wait_s = self._predict_place(backlog.num_waiting + num_promised, sequence, state)
        self.promised.add(key, state.now, wait_s)
        return wait_s

    def _predict_place(self, num_before: int, sequence: Q, state: EngineState) -> float:
        """Predict when a request that has so many before it finds a place, though the engine may be a little slower: in
        the middle of the queue where that is long."""
        limit = self._config.max_queued_requests
        places = ((limit // 2, 1.0), (max(limit - 1, 0), SLOW_SHARE))
        waits = [
            share * self.forecast.predict_return(max(num_before - place, 0), sequence, state) for place, share in places
        ]
        most_s = MAX_RETRY_AFTER_S if self.forecast.is_warm else MAX_COLD_RETRY_AFTER_S
        return min(_retry_after_s(max(waits)), most_s)

    def _count_started(self, sequence: Q, backlog: Backlog[Q]) -> int:
        """Return how many sequences the next step would take, with the new one in its place in the order."""
        self.queue.add(sequence)
        try:
            return backlog.count_started(self.queue)
        finally:
            self.queue.remove(sequence.stream_id)

    def note_admitted(self, admitted: Iterable[Q]) -> None:
        """Note which sequences a step takes out of the queue, before it does."""
        num_admitted = sum(sequence.priority < BACKGROUND_PRIORITY for sequence in admitted)
        self._num_foreground_waiting = self.queue.num_waiting_before(BACKGROUND_PRIORITY) - num_admitted

    def stats(self, num_running: int) -> dict[str, Any]:
        """Return the fields of EngineStats about the queue, the waits and the speed while so many sequences run."""
        return {
            "predicted_wait_s": self._predicted_wait_s,
            "num_tokens_waiting": self.queue.num_tokens,
            "num_foreground_waiting": self._num_foreground_waiting,
            **self.forecast.speeds(num_running),
            "waits_total": self.forecast.waits_total,
            "wait_seconds_total": self.forecast.wait_seconds_total,
            "wait_error_seconds_total": self.forecast.wait_error_seconds_total,
        }

    def update_prediction(
        self, running: Collection[QueuedSequence], count_free_blocks: Callable[[], int], now: float
    ) -> None:
        """Predict anew, for `stats`, the wait of a small request without tenant or priority that comes now; not more
        often than heartbeats are due, because it is costly."""
        if now - self._last_prediction >= HEARTBEAT_S:
            self._last_prediction = now
            state = EngineState(running, self.queue, count_free_blocks(), now)
            self._predicted_wait_s = self.forecast.predict_wait(0, "", 1, state).wait_s

    def charge_output(self, sequence: Q, at_least: int = 1) -> int:
        """Charge the output since the last charge to the sequence's tenant, once it is `at_least` so many tokens.
        Returns how many were charged."""
        fresh = sequence.num_output - sequence.num_charged
        if fresh < at_least:
            return 0
        self.queue.charge(sequence, fresh)
        sequence.num_charged = sequence.num_output
        return fresh


class WaitingLoad(NamedTuple):
    """The requests that wait as a new one comes."""

    num_requests: int
    num_tokens: float
    """Tokens to compute before each has its first new one."""
    num_places: int
    """Sequences that may start before `max_num_seqs` run."""
    count_held_back: Callable[[], int]
    """Returns how many requests, with the new one, the next step would not take. To be called only where the other
    counts do not decide, because it looks for blocks and prefixes."""
    num_promised: int = 0
    """Requests that are expected back before the new one would start, and have places in the queue."""


def find_excess(request: GenerateRequest, waiting: WaitingLoad, config: EngineConfig) -> str | None:
    """Return by how much the queue is too long for the new request; None if it may wait, or starts at once.

    `max_queued_requests` counts only the requests that the next step cannot take, for want of places or of blocks.
    `max_queued_tokens` counts those of all that wait, and does not apply while the next step takes all of them and this
    request.
    """
    return _excess_requests(waiting, config) or _excess_tokens(request, waiting, config)


def check_deadlines(request: GenerateRequest, prediction: WaitPrediction) -> None:
    """Raise DEADLINE if the request would wait too long."""
    _check_deadline("queue_timeout_s", request.queue_timeout_s, prediction, 0.0)
    _check_deadline("timeout_s", request.timeout_s, prediction, prediction.service_s)


def check_reported_queue(stats: EngineStats, max_num_seqs: int, config: EngineConfig) -> None:
    """Raise OVERLOADED if, by an engine's last report, any request that comes now finds a full queue."""
    num_blocked = stats.num_waiting - (max_num_seqs - stats.num_running)
    if num_blocked >= config.max_queued_requests:
        prediction = WaitPrediction(stats.predicted_wait_s)
        raise _queue_full(_too_many(num_blocked, 0, config), prediction, _retry_after_s(stats.predicted_wait_s))


def check_waiting(num_waiting: int, info: EngineInfo, config: EngineConfig) -> None:
    """Raise OVERLOADED if too many requests wait for an engine that is being replaced, and is not there to say so."""
    limit = info.max_num_seqs + config.max_queued_requests
    if num_waiting < limit:
        return
    message = (
        f"the engine is restarting and {num_waiting} requests wait for it; the limit is {limit} (--max-num-seqs plus "
        "--max-queue-size)"
    )
    raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=max(1.0, info.load_seconds))


def deadline_error(sequence: QueuedSequence, now: float) -> SluiceError:
    """Make the error of a sequence that is past its deadline to end or to start."""
    request = sequence.request
    if now >= sequence.deadline:
        message = f"the request was not complete within its {request.timeout_s:g} s"
    else:
        message = f"the request waited for longer than its {request.queue_timeout_s:g} s"
    return SluiceError(ErrorCode.DEADLINE, f"{message}; the server is busy")


def _excess_requests(waiting: WaitingLoad, config: EngineConfig) -> str | None:
    limit = config.max_queued_requests - waiting.num_promised
    num_blocked = waiting.num_requests + 1 - waiting.num_places
    if waiting.num_requests < limit:
        return None
    if num_blocked <= max(limit, 0):
        num_blocked = waiting.count_held_back()
    if num_blocked <= max(limit, 0):
        return None
    return _too_many(num_blocked - 1, waiting.num_promised, config)


def _too_many(num_blocked: int, num_promised: int, config: EngineConfig) -> str:
    promised = f", {num_promised} that were refused come back before this one" if num_promised else ""
    return f"{num_blocked} requests wait{promised} and the limit is {config.max_queued_requests} (--max-queue-size)"


def _excess_tokens(request: GenerateRequest, waiting: WaitingLoad, config: EngineConfig) -> str | None:
    limit = config.max_queued_tokens
    num_tokens = len(request.prompt_token_ids) + len(request.resume_token_ids)
    if limit is None or waiting.num_tokens + num_tokens <= limit:
        return None
    if waiting.num_requests < waiting.num_places and not waiting.count_held_back():
        return None
    return (
        f"{waiting.num_tokens:.0f} prompt tokens wait, this request has {num_tokens} and the limit is {limit} "
        "(--max-queue-tokens)"
    )


def _request_key(request: GenerateRequest) -> int:
    """Return what tells a request that comes back from others."""
    return hash((request.tenant, request.adapter, request.sampling.max_tokens, *request.prompt_token_ids))


def _queue_full(excess: str, prediction: WaitPrediction, retry_after_s: float) -> SluiceError:
    return SluiceError(
        ErrorCode.OVERLOADED,
        f"the queue is full: {excess}; the wait would be about {_seconds(prediction.wait_s)}, "
        f"try again in {math.ceil(retry_after_s)} s",
        retry_after_s=retry_after_s,
    )


def _wait_too_long(most_wait_s: float, prediction: WaitPrediction) -> SluiceError:
    message = f"the wait would be about {_seconds(prediction.wait_s)}, and the client takes {_seconds(most_wait_s)}"
    error = SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=_retry_after_s(prediction.wait_s))
    error.predicted_wait_s = prediction.wait_s
    return error


def _check_deadline(name: str, limit_s: float | None, prediction: WaitPrediction, service_s: float) -> None:
    if limit_s is None or prediction.earliest_s + service_s <= limit_s:
        return
    allowed = "may wait" if name == "queue_timeout_s" else "may take"
    service = f" and the answer take {_seconds(service_s)} more" if prediction.wait_s <= limit_s else ""
    retry_after_s = _retry_after_s(prediction.wait_s)
    raise SluiceError(
        ErrorCode.DEADLINE,
        f"the wait would be about {_seconds(prediction.wait_s)}{service}, and the request {allowed} {limit_s:g} s; "
        f"try again in {math.ceil(retry_after_s)} s, or allow more time",
        param=name,
        retry_after_s=retry_after_s,
    )


def _retry_after_s(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def _seconds(wait_s: float) -> str:
    return f"{wait_s:.1f} s" if wait_s < 10 else f"{wait_s:.0f} s"
