"""Admission control, in front of every executor: whether a request may wait, in which order, and for how long."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, NamedTuple

from sluice.engine.config import EngineConfig
from sluice.engine.forecast.wait import EngineState, WaitForecast, WaitPrediction
from sluice.engine.queued import QueuedSequence
from sluice.engine.scheduling.arrivals import EARLY_S, PromisedPlaces
from sluice.engine.scheduling.fair_share import Q
from sluice.engine.scheduling.queue import WaitingQueue
from sluice.engine.statistics import EngineStats
from sluice.engine.types import BACKGROUND_PRIORITY, EngineInfo, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

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
            "num_tokens_waiting": self.queue.num_tokens,
            "num_foreground_waiting": self._num_foreground_waiting,
            **self.forecast.speeds(num_running),
            "waits_total": self.forecast.waits_total,
            "wait_seconds_total": self.forecast.wait_seconds_total,
            "wait_error_seconds_total": self.forecast.wait_error_seconds_total,
        }

    def predict_wait(self, running: Collection[QueuedSequence], free_blocks: int, now: float) -> float:
        """Predict the wait in seconds of a small request without tenant or priority that comes now."""
        return self.forecast.predict_wait(0, "", 1, EngineState(running, self.queue, free_blocks, now)).wait_s


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
