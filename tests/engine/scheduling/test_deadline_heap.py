import math

from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.scheduling.queue import MAX_STALE_DEADLINES, DeadlineHeap


def test_who_is_due_is_told_once_the_longest_overdue_first() -> None:
    deadlines = DeadlineHeap()
    for stream_id, due in enumerate((7.0, 3.0, math.inf, 5.0)):
        deadlines.add(stream_id, due)
    assert deadlines.next() == 3.0
    assert deadlines.take_due(5.0) == [1, 3]
    assert deadlines.take_due(5.0) == []
    assert deadlines.next() == 7.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.sampled_from([1.0, 2.0, 3.0, math.inf]))))
def test_it_is_a_dictionary_by_another_name(changes: list[tuple[bool, int, float]]) -> None:
    deadlines, model = DeadlineHeap(), dict[int, float]()
    for is_added, stream_id, due in changes:
        if is_added and stream_id not in model:
            deadlines.add(stream_id, due)
            model[stream_id] = due
        elif not is_added:
            deadlines.discard(stream_id)
            model.pop(stream_id, None)
    assert deadlines.next() == min(model.values(), default=math.inf)
    assert sorted(deadlines.take_due(2.0)) == sorted(number for number, due in model.items() if due <= 2.0)


def test_those_that_left_take_little_room() -> None:
    deadlines = DeadlineHeap()
    for stream_id in range(10_000):
        deadlines.add(stream_id, float(stream_id % 7))
        if stream_id >= 50:
            deadlines.discard(stream_id - 50)
    assert len(deadlines) == 50 and len(deadlines._heap) <= 2 * 50 + MAX_STALE_DEADLINES
