"""What every executor has in front of it: who may wait, in which order, and for how long."""

from collections.abc import Collection
from typing import Generic, Protocol

from engine.config import EngineConfig
from engine.forecast.forecast import Forecast, Running
from engine.frames import Submit
from engine.scheduling.admission import Prediction, Room, check_queue
from engine.scheduling.fair_share import Q
from engine.scheduling.queue import WaitingQueue
from engine.types import EngineInfo, GenerateRequest
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
