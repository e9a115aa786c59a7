"""Whether one more request may wait."""

import math
from collections.abc import Collection
from typing import Generic, NamedTuple, Protocol

from engine.config import EngineConfig
from engine.forecast.wait import Backlog, Forecast, Running
from engine.frames import Submit
from engine.scheduling.fair_share import Q
from engine.scheduling.queue import WaitingQueue
from engine.types import EngineInfo, EngineStats, GenerateRequest
from sluice.errors import ErrorCode, SluiceError


class Reception(Generic[Q]):
    """The queue and the forecast. One thread uses it."""

    def __init__(self, info: EngineInfo, config: EngineConfig) -> None:
        self._info = info
        self._config = config
        self.queue: WaitingQueue[Q] = WaitingQueue(config.tenant_weights)
        self.forecast = Forecast(info)

    def check_in(self, command: Submit, num_blocks: int, running: Collection[Running], free_blocks: int) -> float:
        """Seconds that the request, which holds at most `num_blocks`, will wait; `free_blocks` are not reserved.

        Raises SluiceError: OVERLOADED where the queue is full, DEADLINE where the wait would be too long. What an
        engine before this one had accepted is not refused.
        """
        request = command.request
        ahead = self.queue.ahead_of(request.priority, request.tenant)
        wait_s = self.forecast.wait_s(running, ahead, num_blocks, free_blocks)
        if not command.was_accepted:
            room = Room(self._info.max_num_seqs - len(running), free_blocks)
            prediction = Prediction(wait_s, self.forecast.is_warm)
            check_queue(request, num_blocks, self.queue.backlog, room, self._config, prediction)
        return wait_s

    def predict_wait(self, running: Collection[Running], free_blocks: int) -> float:
        """What a small request of the default kind would wait now, in seconds."""
        return self.forecast.wait_s(running, self.queue.ahead_of(0, ""), 1, free_blocks)


class Timed(Protocol):
    """A sequence whose time may be over."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def deadline(self) -> float: ...


def too_late(sequence: Timed, now: float) -> SluiceError:
    """Which of its two times the sequence is past."""
    request = sequence.request
    if now >= sequence.deadline:
        message = f"the request was not complete within its {request.timeout_s:g} s"
    else:
        message = f"the request waited for longer than its {request.queue_timeout_s:g} s"
    return SluiceError(ErrorCode.DEADLINE, f"{message}; the server is busy")


MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
"""Bounds of `Retry-After`: no client hammers a full queue, and none stays away on a forecast of more than a minute."""
DEADLINE_MARGIN = 1.5
MIN_EXCESS_S = 0.5
"""A request is refused for its deadline only if the predicted wait is DEADLINE_MARGIN times the time it has, and
MIN_EXCESS_S more than it: most predictions are nearer than that to what comes, and to refuse what could have been
served is worse than to let wait what could not."""


class Room(NamedTuple):
    """What is not reserved: places among `max_num_seqs`, and KV blocks."""

    places: int
    blocks: int


class Prediction(NamedTuple):
    """How long a request would wait. `is_warm`: whether the forecast has seen enough to refuse by it."""

    wait_s: float
    is_warm: bool

    @property
    def retry_after_s(self) -> float:
        """The wait within its bounds."""
        return min(max(self.wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


def check_queue(
    request: GenerateRequest,
    worst_case_blocks: int,
    waiting: Backlog,
    room: Room,
    config: EngineConfig,
    prediction: Prediction,
) -> None:
    """Raise OVERLOADED where the queue is full, with the time until it has moved on, and DEADLINE where the
    request would wait past its own.

    The limits count those that wait in vain. `max_queued_requests`: as many as there are free places among the
    `max_num_seqs` may stand in the queue besides, since the next step takes them. `max_queued_tokens`: it does not
    hold while there is room for all that wait and this request too.
    """
    excess = _too_many_requests(waiting.num_requests, room.places, config)
    if excess is None and not _fits(worst_case_blocks, waiting, room):
        excess = _too_many_tokens(request, waiting, config)
    if excess is not None:
        raise _full(excess, prediction)
    if prediction.is_warm:
        _check_deadline("queue_timeout_s", request.queue_timeout_s, prediction)
        _check_deadline("timeout_s", request.timeout_s, prediction)


def check_places(stats: EngineStats, max_num_seqs: int, config: EngineConfig) -> None:
    """Raise OVERLOADED where, by an engine's last report, whatever request comes now finds a full queue."""
    excess = _too_many_requests(stats.num_waiting, max_num_seqs - stats.num_running, config)
    if excess is not None:
        raise _full(excess, Prediction(stats.predicted_wait_s, is_warm=False))


def _too_many_requests(num_waiting: float, num_places: int, config: EngineConfig) -> str | None:
    limit, num_in_vain = config.max_queued_requests, num_waiting - num_places
    if num_in_vain < limit:
        return None
    return f"{num_in_vain:.0f} requests wait and the limit is {limit} (max_queued_requests)"


def _too_many_tokens(request: GenerateRequest, waiting: Backlog, config: EngineConfig) -> str | None:
    limit = config.max_queued_tokens
    num_tokens = len(request.prompt_token_ids) + len(request.resume_token_ids)
    if limit is None or waiting.num_tokens + num_tokens <= limit:
        return None
    return (
        f"{waiting.num_tokens:.0f} prompt tokens wait, this request has {num_tokens} and the limit is {limit} "
        "(max_queued_tokens)"
    )


def _fits(worst_case_blocks: int, waiting: Backlog, room: Room) -> bool:
    """Whether the next step takes all that wait and this one too."""
    return waiting.num_requests < room.places and waiting.num_blocks + worst_case_blocks <= room.blocks


def _full(excess: str, prediction: Prediction) -> SluiceError:
    retry_after_s = prediction.retry_after_s
    return SluiceError(
        ErrorCode.OVERLOADED,
        f"the queue is full: {excess}; the wait would be about {_seconds(prediction.wait_s)}, "
        f"try again in {math.ceil(retry_after_s)} s",
        retry_after_s=retry_after_s,
    )


def _check_deadline(name: str, limit_s: float | None, prediction: Prediction) -> None:
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
