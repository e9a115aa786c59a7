"""Admission control, in front of every executor: whether a request may wait, in which order, and for how long."""

import math
from collections.abc import Collection
from typing import Generic, NamedTuple, Protocol

from engine.config import EngineConfig
from engine.forecast.wait import QueuedWork, RunningSequence, WaitForecast
from engine.frames import Submit
from engine.scheduling.fair_share import Q
from engine.scheduling.queue import WaitingQueue
from engine.types import EngineInfo, EngineStats, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""Bounds of `Retry-After`: no client hammers a full queue, and none stays away for long on a mere forecast."""
DEADLINE_MARGIN = 1.5
MIN_EXCESS_S = 0.5
"""A request is rejected for its deadline only if the predicted wait is DEADLINE_MARGIN times the time it has, and
MIN_EXCESS_S longer. Most predictions are more accurate than that, and to reject what could have been served is worse
than to queue what could not."""


class AdmissionController(Generic[Q]):
    """The waiting queue and the wait forecast of one engine. Used by one thread."""

    def __init__(self, info: EngineInfo, config: EngineConfig) -> None:
        self._info = info
        self._config = config
        self.queue: WaitingQueue[Q] = WaitingQueue(config.tenant_weights)
        self.forecast = WaitForecast(info)

    def check_admission(
        self, command: Submit, num_blocks: int, running: Collection[RunningSequence], free_blocks: int
    ) -> float:
        """Check whether the request may wait. Returns the predicted wait in seconds. `num_blocks` is the most the
        request can need, and `free_blocks` how many are not reserved. Raises OVERLOADED if the queue is full, DEADLINE
        if the wait would be too long. A request that a lost engine had accepted is never rejected."""
        request = command.request
        ahead = self.queue.work_ahead(request.priority, request.tenant)
        wait_s = self.forecast.wait_s(running, ahead, num_blocks, free_blocks)
        if not command.was_accepted:
            free = FreeCapacity(self._info.max_num_seqs - len(running), free_blocks)
            prediction = WaitPrediction(wait_s, self.forecast.is_warm)
            check_queue_limits(request, num_blocks, self.queue.work, free, self._config, prediction)
        return wait_s

    def predict_wait(self, running: Collection[RunningSequence], free_blocks: int) -> float:
        """Predict the wait in seconds of a small request without tenant or priority."""
        return self.forecast.wait_s(running, self.queue.work_ahead(0, ""), 1, free_blocks)


class FreeCapacity(NamedTuple):
    """The capacity that is not reserved: sequences up to `max_num_seqs`, and KV blocks."""

    sequences: int
    blocks: int


class WaitPrediction(NamedTuple):
    """The predicted wait of a request. `is_warm`: whether the forecast has observed enough to reject by it."""

    wait_s: float
    is_warm: bool

    @property
    def retry_after_s(self) -> float:
        """The wait within its bounds."""
        return min(max(self.wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def check_queue_limits(
    request: GenerateRequest,
    worst_case_blocks: int,
    waiting: QueuedWork,
    free: FreeCapacity,
    config: EngineConfig,
    prediction: WaitPrediction,
) -> None:
    """Raise OVERLOADED if the queue is full, with the predicted wait, and DEADLINE if the request would wait too long.

    The limits count only the sequences that the next step cannot take. `max_queued_requests`: as many more may wait
    as there are free places in `max_num_seqs`. `max_queued_tokens`: it does not apply while all waiting sequences and
    this request fit.
    """
    excess = _excess_requests(waiting.num_requests, free.sequences, config)
    if excess is None and not _fits(worst_case_blocks, waiting, free):
        excess = _excess_tokens(request, waiting, config)
    if excess is not None:
        raise _queue_full(excess, prediction)
    if prediction.is_warm:
        _check_deadline("queue_timeout_s", request.queue_timeout_s, prediction)
        _check_deadline("timeout_s", request.timeout_s, prediction)


def check_reported_queue(stats: EngineStats, max_num_seqs: int, config: EngineConfig) -> None:
    """Raise OVERLOADED if, by an engine's last report, any request that comes now finds a full queue."""
    excess = _excess_requests(stats.num_waiting, max_num_seqs - stats.num_running, config)
    if excess is not None:
        raise _queue_full(excess, WaitPrediction(stats.predicted_wait_s, is_warm=False))


class HasDeadlines(Protocol):
    """A sequence with deadlines."""

    request: GenerateRequest
    deadline: float


def deadline_error(sequence: HasDeadlines, now: float) -> SluiceError:
    """Make the error of a sequence that is past its deadline to end or to start."""
    request = sequence.request
    if now >= sequence.deadline:
        message = f"the request was not complete within its {request.timeout_s:g} s"
    else:
        message = f"the request waited for longer than its {request.queue_timeout_s:g} s"
    return SluiceError(ErrorCode.DEADLINE, f"{message}; the server is busy")


def _excess_requests(num_waiting: float, num_free: int, config: EngineConfig) -> str | None:
    limit, num_blocked = config.max_queued_requests, num_waiting - num_free
    if num_blocked < limit:
        return None
    return f"{num_blocked:.0f} requests wait and the limit is {limit} (max_queued_requests)"


def _excess_tokens(request: GenerateRequest, waiting: QueuedWork, config: EngineConfig) -> str | None:
    limit = config.max_queued_tokens
    num_tokens = len(request.prompt_token_ids) + len(request.resume_token_ids)
    if limit is None or waiting.num_tokens + num_tokens <= limit:
        return None
    return (
        f"{waiting.num_tokens:.0f} prompt tokens wait, this request has {num_tokens} and the limit is {limit} "
        "(max_queued_tokens)"
    )


def _fits(worst_case_blocks: int, waiting: QueuedWork, free: FreeCapacity) -> bool:
    """Return whether the next step takes all waiting sequences and this one."""
    return waiting.num_requests < free.sequences and waiting.num_blocks + worst_case_blocks <= free.blocks


def _queue_full(excess: str, prediction: WaitPrediction) -> SluiceError:
    retry_after_s = prediction.retry_after_s
    return SluiceError(
        ErrorCode.OVERLOADED,
        f"the queue is full: {excess}; the wait would be about {_seconds(prediction.wait_s)}, "
        f"try again in {math.ceil(retry_after_s)} s",
        retry_after_s=retry_after_s,
    )


def _check_deadline(name: str, limit_s: float | None, prediction: WaitPrediction) -> None:
    if limit_s is None or prediction.wait_s <= max(DEADLINE_MARGIN * limit_s, limit_s + MIN_EXCESS_S):
        return
    raise SluiceError(
        ErrorCode.DEADLINE,
        f"the wait would be about {_seconds(prediction.wait_s)} and {name} is {limit_s:g} s; "
        f"try again in {math.ceil(prediction.retry_after_s)} s, or allow more time",
        param=name,
        retry_after_s=prediction.retry_after_s,
    )


def _seconds(wait_s: float) -> str:
    return f"{wait_s:.1f} s" if wait_s < 10 else f"{wait_s:.0f} s"
