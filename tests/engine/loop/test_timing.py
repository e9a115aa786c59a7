"""What an engine says of where a sequence's time went."""

import pytest

from sluice.engine.frames import StepFrame
from sluice.engine.types import EventDetail, SequenceTiming
from tests.engine.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.usefixtures("looks_ahead")


class Listening(ScriptedExecutor):
    """Keeps every timing, and lets a step take a second."""

    def __init__(self, **limits: object) -> None:
        self.timings: dict[int, list[SequenceTiming]] = {}
        super().__init__(**limits)  # type: ignore[arg-type]

    def record(self, frame: StepFrame) -> None:
        super().record(frame)
        for event in frame.events:
            detail: EventDetail | None = event.detail
            if detail is not None and detail.timing is not None:
                self.timings.setdefault(event.stream_id, []).append(detail.timing)

    def step(self) -> None:
        self.now += 1.0
        super().step()


def test_the_first_event_has_the_wait_and_each_chunk() -> None:
    executor = Listening(max_num_seqs=1)
    executor.submit(1, list(range(1, 40)), max_tokens=3, returns_timing=True)
    executor.submit(2, [1, 2, 3], max_tokens=2, returns_timing=True)
    executor.submit(3, [4, 5, 6], max_tokens=2)
    executor.finish()
    [first], [second] = executor.timings[1], executor.timings[2]
    assert [tokens for _, _, tokens in first.chunks] == [16, 16, 7]
    assert first.queue_s == 0
    assert first.age_s == first.chunks[-1][1] == 2 + executor.runner.looks_ahead
    assert second.queue_s > first.age_s
    assert not first.pauses
    assert 3 not in executor.timings


def test_a_pause_is_told_with_the_first_event_after_it() -> None:
    executor = Listening(scheduler_policy="max_utilization")
    for stream_id in range(4):
        executor.submit(stream_id, [stream_id + 1] * 14, max_tokens=30, returns_timing=True)
    executor.finish()
    assert executor.executor.stats().preemptions_total > 0
    pauses = [pause for timings in executor.timings.values() for timing in timings[1:] for pause in timing.pauses]
    assert len(pauses) == executor.executor.stats().preemptions_total
    assert all(start < end for start, end in pauses)
