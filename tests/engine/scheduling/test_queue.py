"""The queue's order, the guarantees of fair shares, and what they cost."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.scheduling import fair_share
from sluice.engine.scheduling.queue import (
    MAX_GROUPS,
    MAX_PAUSE_S,
    MAX_SOURCES,
    MAX_STALE_DEADLINES,
    ArrivalRates,
    DeadlineHeap,
)
from tests.engine.scheduling.queued import REQUEST, WEIGHTS, View, admit_next, order, queue_of

# -- order


def test_lower_priority_numbers_go_first_whatever_they_were_served() -> None:
    queue = queue_of(
        View(0, priority=1), View(1, priority=0, num_tokens=10_000), View(2, priority=0), View(3, priority=-1)
    )
    assert order(queue) == [3, 1, 2, 0]


def test_a_request_may_bring_its_tenant_s_weight() -> None:
    def view(number: int, tenant: str, weight: float | None = None) -> View:
        return View(number, tenant, request=msgspec.structs.replace(REQUEST, weight=weight))

    queue = queue_of(*(view(i, "a", 4.0) for i in range(100)), *(view(100 + i, "heavy", 1.0) for i in range(100)))
    assert Counter(each.tenant for each in islice(queue.in_order(), 50)) == {"a": 40, "heavy": 10}
    queue.add(view(200, "a"))
    queue.add(view(201, "heavy", 4.0))
    assert Counter(each.tenant for each in islice(queue.in_order(), 50)) == {"a": 25, "heavy": 25}
    assert [each.weight for each in queue.groups(0, "a", 300, 0.0)] == [4.0, 4.0]


def test_paused_sequences_come_back_first_oldest_first_and_free_of_charge() -> None:
    queue = queue_of(*(View(i, "ab"[i % 2]) for i in range(6)))
    first, second = admit_next(queue), admit_next(queue)
    queue.add(View(50, "a", priority=-1))
    queue.requeue(second)
    queue.requeue(first)
    assert order(queue) == [50, 0, 1, 2, 3, 4, 5]
    queue.admit(first)
    queue.admit(second)
    assert order(queue)[1:] == [2, 3, 4, 5], "the counters stand as after the first admission"


# -- fairness

SERVED = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=30, max_size=60)


@settings(deadline=None, max_examples=30)
@given(SERVED, SERVED, st.sampled_from([("a", "b"), ("heavy", "light"), ("a", "heavy")]), st.integers(1, 6))
def test_backlogged_tenants_stay_within_the_bound_of_the_paper(
    one: list[tuple[int, int]], other: list[tuple[int, int]], names: tuple[str, str], places: int
) -> None:
    """Theorem 4.4 of the paper: the service of two backlogged tenants differs by at most 2 max(longest prompt,
    most tokens in a batch), here divided by their weights."""
    queue, lengths = queue_of(), dict[int, int]()
    requests = [*((names[0], *request) for request in one), *((names[1], *request) for request in other)]
    for stream_id, (tenant, num_tokens, num_output) in enumerate(requests):
        queue.add(View(stream_id, tenant, num_tokens))
        lengths[stream_id] = num_output
    served = dict.fromkeys(names, 0.0)
    bound = 2 * places * (60 + 60) / min(WEIGHTS.get(name, 1.0) for name in names)
    left = Counter(view.tenant for view in queue)
    running: list[View] = []
    while all(left[name] for name in names):
        while len(running) < places and len(queue):
            view = admit_next(queue)
            running.append(view)
            left[view.tenant] -= 1
            served[view.tenant] += view.num_tokens / WEIGHTS.get(view.tenant, 1.0)
        for view in list(running):
            queue.charge(view, 1)
            served[view.tenant] += 1 / WEIGHTS.get(view.tenant, 1.0)
            lengths[view.stream_id] -= 1
            if not lengths[view.stream_id]:
                running.remove(view)
                queue.remove(view.stream_id)
        assert abs(served[names[0]] - served[names[1]]) <= bound


@given(st.lists(st.sampled_from(["b", "c", "heavy"]), min_size=1, max_size=200))
def test_a_waiting_sequence_is_admitted_however_many_others_keep_coming(tenants: list[str]) -> None:
    """Each tenant passes it at most once, and again only when its own counter has been passed."""
    queue = queue_of(*(View(i, "b") for i in range(5)), View(999, "a", 10))
    for i, tenant in enumerate(tenants):
        queue.add(View(1000 + i, tenant))
    admitted = 0
    while 999 in queue:
        queue.add(View(5000 + admitted, "b"))
        admit_next(queue)
        admitted += 1
    assert admitted <= 4, "one each, and its own"


# -- what a forecast reads


def test_the_groups_of_a_forecast_are_what_may_go_before_a_newcomer() -> None:
    queue = queue_of(*(View(i, "a", 10) for i in range(10)), View(50, "x", 7, priority=-1), View(60, "y", priority=1))
    queue.arrivals.observe(0, "absent", 1.0)

    def members(priority: int, tenant: str) -> dict[tuple[float, str], list[int]]:
        groups = queue.groups(priority, tenant, 100, 2.0)
        assert (groups[0].priority, groups[0].tenant) == (priority, tenant)
        return {(group.priority, group.tenant): [s.stream_id for s in group.waiting] for group in groups}

    assert members(0, "a") == {(0, "a"): [*range(10)], (-1, "x"): [50], (0, "absent"): []}
    assert members(0, "new") == {(0, "new"): [], (0, "a"): [*range(10)], (-1, "x"): [50], (0, "absent"): []}
    assert members(-1, "new") == {(-1, "new"): [], (-1, "x"): [50]}
    assert len(queue.groups(0, "a", 3, 2.0)[0].waiting) == 2, "of a long queue, those that go first"
    assert (queue.num_waiting(0, "a"), queue.num_waiting(0, "new"), queue.num_waiting(7, "a")) == (10, 0, 0)


def test_a_forecast_tells_a_bounded_number_of_tenants_apart() -> None:
    queue = queue_of(*(View(i, f"t{i}", 10) for i in range(3 * MAX_GROUPS)))
    assert len(queue.groups(0, "late", 1000, 0.0)) == MAX_GROUPS


# -- cost


def _cost_of_planning(num_waiting: int, num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the heap operations and the visited sequences for 16 admissions and a charged step."""
    queue = queue_of(*(View(i, f"t{i % num_tenants}", 1 + i % 7) for i in range(num_waiting)))
    operations = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal operations
            operations += 1
            return function(*arguments)

        return call

    for name in ("heappush", "heappop", "heapreplace", "heapify"):
        monkeypatch.setattr(fair_share, name, counted(getattr(fair_share, name)))
    for _ in range(3):
        for view in list(islice(queue.in_order(), 5)):
            queue.admit(view)
            queue.charge(view, 3)
    monkeypatch.undo()
    return operations


@pytest.mark.parametrize("num_tenants", [1, 5, 1000])
def test_planning_costs_the_same_with_ten_thousand_waiting(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = _cost_of_planning(20, num_tenants, monkeypatch), _cost_of_planning(10_000, num_tenants, monkeypatch)
    assert many <= 2 * few + 20, (few, many)


# -- memory


def test_cancelled_sequences_leave_nothing_behind() -> None:
    queue = queue_of()
    for i in range(20_000):
        queue.add(View(i, f"t{i % 3000}", priority=i % 3, start_deadline=float(i)))
        if i >= 100:
            queue.remove(i - 100)
    classes = queue._classes.values()
    assert len(queue) == 100
    assert sum(len(members.new._tenants) for members in classes) <= 110
    assert sum(len(members.new._heap) + len(members.new._idle) for members in classes) <= 3 * (2 * 100 + 2 * 16)
    assert len(queue._deadlines._heap) <= 2 * 100 + 16


def test_served_tenants_are_forgotten_while_others_keep_the_class_busy() -> None:
    queue = queue_of(*(View(i, "busy") for i in range(3)))
    most = 0
    for i in range(5000):
        queue.add(View(10 * i + 100, f"passing {i}", num_tokens=1 + i % 40))
        queue.add(View(10 * i + 101, "busy"))
        for _ in range(2):
            view = admit_next(queue)
            queue.charge(view, 5)
            queue.remove(view.stream_id)
        most = max(most, len(queue._classes[0].new._tenants))
    assert most <= 60


def test_a_tenant_that_runs_is_not_forgotten() -> None:
    queue = queue_of(View(0, "runs", 10), *(View(10 + i, "busy", 10) for i in range(20)))
    running = admit_next(queue)
    assert running.tenant == "runs"
    for _ in range(10):
        queue.remove(admit_next(queue).stream_id)
    queue.add(View(50, "new"))  # when the idle ones at the floor are forgotten
    queue.charge(running, 500)
    queue.add(View(60, "runs"))
    assert order(queue)[-1] == 60


# -- deadlines


def test_who_waits_too_long_is_told_once_in_time() -> None:
    queue = queue_of(
        View(0, start_deadline=5.0), View(1, deadline=3.0), View(2), View(3, start_deadline=9.0, deadline=4.0),
        View(4, start_deadline=8.0, deadline=9.0),
    )  # fmt: skip
    assert queue.next_expiry() == 3.0
    assert queue.expired(2.9) == []
    assert [view.stream_id for view in queue.expired(4.5)] == [1, 3]
    assert queue.expired(4.5) == [] and len(queue) == 5
    queue.admit(queue.get(0) or pytest.fail("0 waits"))
    assert [view.stream_id for view in queue.expired(8.0)] == [4]
    assert queue.next_expiry() == math.inf and queue.expired(100.0) == []


def test_a_paused_sequence_has_met_its_deadline_to_start() -> None:
    queue = queue_of(View(0, start_deadline=5.0, deadline=50.0))
    view = admit_next(queue)
    queue.requeue(view)
    assert queue.expired(49.0) == []
    assert queue.expired(50.0) == [view]


def steady(arrivals: ArrivalRates, count: int, per_s: float, from_s: float = 0.0) -> None:
    for number in range(count):
        arrivals.observe(0, "a", from_s + number / per_s)


def test_the_rate_of_a_tenant_is_what_came_of_late() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 400, 20.0)
    rate, duration_s = arrivals.expect(0, "a", 20.0)
    assert rate == pytest.approx(20.0, rel=0.1)
    assert duration_s == pytest.approx(20.0), "as long as it has"
    assert arrivals.expect(0, "other", 20.0) == (0.0, 0.0)
    assert arrivals.expect(0, "a", 25.0)[0] < 15.0
    assert arrivals.expect(0, "a", 21.0 + MAX_PAUSE_S) == (0.0, 0.0)


def test_the_rate_is_known_soon_after_a_tenant_has_begun_again() -> None:
    """Averaged over the pause before, it would be 4 in a second."""
    arrivals = ArrivalRates()
    arrivals.observe(0, "a", 0.0)
    steady(arrivals, 20, 80.0, from_s=MAX_PAUSE_S / 2)
    assert arrivals.expect(0, "a", MAX_PAUSE_S / 2 + 0.25)[0] > 15.0


def test_a_crowd_is_not_expected_to_go_on_once_it_has_paused() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 100, 1000.0)
    assert arrivals.expect(0, "a", 0.1)[0] > 500.0
    assert arrivals.expect(0, "a", 0.3)[0] < 110.0, "as many as in all, not as of late"
    steady(arrivals, 100, 1000.0, from_s=1.0)
    assert arrivals.expect(0, "a", 1.1)[0] > 500.0


def test_a_tenant_that_comes_back_after_a_long_pause_begins_anew() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 50, 50.0)
    arrivals.observe(0, "a", 100.0)
    rate, duration_s = arrivals.expect(0, "a", 102.0)
    assert rate < 1.0 and duration_s == 2.0


def test_it_forgets_who_came_longest_ago() -> None:
    arrivals = ArrivalRates()
    for number in range(MAX_SOURCES + 1):
        arrivals.observe(0, str(number), 0.0)
    assert len(arrivals.sources()) == MAX_SOURCES and (0, "0") not in arrivals.sources()


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
