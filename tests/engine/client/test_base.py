"""The client's own timers for deadlines, and counters that continue over several engines."""

import asyncio

import msgspec

from sluice.engine.client.counters import NO_STATS, add_counters, without_gauges
from sluice.engine.client.timers import RequestTimers
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.virtual import in_virtual_time
from tests.engine.parts import make_request


class ExpiryRecorder:
    """Records the expired streams, and answers whether a request had started."""

    def __init__(self, *answers: bool | None) -> None:
        self._answers = list(answers)
        self.expired: asyncio.Queue[tuple[int, SluiceError]] = asyncio.Queue()
        self.settled = asyncio.Event()
        clock = asyncio.get_running_loop().time
        self.timers = RequestTimers(self.has_started, lambda *what: self.expired.put_nowait(what), clock)

    def has_started(self, stream_id: int, deadline: float) -> bool | None:
        answer = self._answers.pop(0)
        if answer:
            self.settled.set()
        return answer


@in_virtual_time
async def test_a_request_that_takes_too_long_expires() -> None:
    recorder = ExpiryRecorder()
    recorder.timers.watch(1, make_request([1], timeout_s=0.02))
    stream_id, error = await recorder.expired.get()
    assert (stream_id, error.code) == (1, ErrorCode.DEADLINE)
    assert "not complete within its 0.02 s" in error.message


@in_virtual_time
async def test_one_that_waits_too_long_expires_once_that_is_known() -> None:
    recorder = ExpiryRecorder(None, None, False)
    recorder.timers.watch(1, make_request([1], queue_timeout_s=0.02))
    _, error = await recorder.expired.get()
    assert "waited for longer than its 0.02 s" in error.message


@in_virtual_time
async def test_those_that_started_or_ended_in_time_do_not() -> None:
    recorder = ExpiryRecorder(True)
    recorder.timers.watch(1, make_request([1], queue_timeout_s=0.02))
    recorder.timers.watch(2, make_request([1], timeout_s=0.01, queue_timeout_s=0.01))
    recorder.timers.remove(2)
    recorder.timers.watch(3, make_request([1]))
    recorder.timers.remove(3)
    await recorder.settled.wait()
    assert recorder.expired.empty()


def test_counters_go_on_where_the_engine_before_stopped_and_gauges_do_not() -> None:
    before = msgspec.structs.replace(
        NO_STATS, num_running=4, steps_total=10, wait_seconds_total=1.5, predicted_wait_s=2.0
    )
    lost = without_gauges(before)
    assert lost == msgspec.structs.replace(before, num_running=0, predicted_wait_s=0.0)
    now = msgspec.structs.replace(
        NO_STATS, num_running=2, steps_total=3, generation_tokens_total=7, wait_seconds_total=0.5
    )
    expected = {"num_running": 2, "steps_total": 13, "generation_tokens_total": 7, "wait_seconds_total": 2.0}
    assert add_counters(lost, now) == msgspec.structs.replace(NO_STATS, **expected)
