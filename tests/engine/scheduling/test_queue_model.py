"""The queue against a model that sorts."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.scheduling.queue import WaitingQueue
from tests.engine.scheduling.queued import WEIGHTS, View, admit_next, order, queue_of

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "admit", "admit_other", "charge", "pause", "remove"]),
        st.integers(0, 30),
        st.sampled_from(["a", "b", "heavy", "light"]),
        st.integers(0, 1),
    ),
    max_size=60,
)


@dataclass
class Model:
    """A model of the queue's rules that sorts all waiting sequences."""

    waiting: list[View] = field(default_factory=list)
    running: list[View] = field(default_factory=list)
    paused: list[View] = field(default_factory=list)
    counters: dict[tuple[int, str], float] = field(default_factory=dict)
    last_active: dict[int, str] = field(default_factory=dict)

    def _share(self, view: View, num_tokens: int) -> float:
        return num_tokens / WEIGHTS.get(view.tenant, 1.0)

    def _active(self, priority: int) -> set[str]:
        return {view.tenant for view in self.waiting if view.priority == priority}

    def add(self, view: View) -> None:
        priority, active = view.priority, self._active(view.priority)
        if active:
            floor = min(self.counters[priority, tenant] for tenant in active)
        else:
            floor = self.counters.get((priority, self.last_active.get(priority, "")), 0.0)
        if view.tenant not in active:
            self.counters[priority, view.tenant] = max(self.counters.get((priority, view.tenant), 0.0), floor)
        self.waiting.append(view)

    def charge(self, view: View, num_tokens: int) -> None:
        self.counters[view.priority, view.tenant] += self._share(view, num_tokens)

    def leave(self, view: View) -> None:
        self.waiting.remove(view)
        if view.tenant not in self._active(view.priority):
            self.last_active[view.priority] = view.tenant

    def forget_idle_class(self, priority: int) -> None:
        if not any(view.priority == priority for view in (*self.waiting, *self.running, *self.paused)):
            self.counters = {key: value for key, value in self.counters.items() if key[0] != priority}
            self.last_active.pop(priority, None)

    def order(self) -> list[int]:
        counters, left, found = dict(self.counters), list(self.waiting), []
        for priority in sorted({view.priority for view in (*self.waiting, *self.paused)}):
            found += sorted(view.stream_id for view in self.paused if view.priority == priority)
            while any(view.priority == priority for view in left):
                candidates = [view for view in left if view.priority == priority]
                best = min(candidates, key=lambda view: (counters[priority, view.tenant], view.stream_id))
                left.remove(best)
                counters[priority, best.tenant] += self._share(best, best.num_tokens)
                found.append(best.stream_id)
        return found


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_it_is_the_model_whatever_happens(operations: list[tuple[str, int, str, int]]) -> None:
    queue, model = queue_of(), Model()
    for stream_id, (name, size, tenant, priority) in enumerate(operations):
        if name == "add":
            view = View(stream_id, tenant, size + 1, priority, worst_case_blocks=size)
            queue.add(view)
            model.add(view)
        elif name in ("admit", "admit_other") and len(queue):
            waiting = list(queue.in_order())
            view = waiting[0 if name == "admit" else size % len(waiting)]
            queue.admit(view)
            if view in model.paused:
                model.paused.remove(view)
            else:
                model.leave(view)
                model.charge(view, view.num_tokens)
            model.running.append(view)
        elif name in ("charge", "pause") and model.running:
            view = model.running[size % len(model.running)]
            if name == "charge":
                queue.charge(view, size)
                model.charge(view, size)
            else:
                queue.requeue(view)
                model.running.remove(view)
                model.paused.append(view)
        elif name == "remove":
            assert queue.remove(-1) is None, "one that is unknown"
            known = [*model.waiting, *model.running, *model.paused]
            if known:
                view = known[size % len(known)]
                assert queue.remove(view.stream_id) is view
                if view in model.waiting:
                    model.leave(view)
                for group in (model.running, model.paused):
                    if view in group:
                        group.remove(view)
                model.forget_idle_class(view.priority)
        _assert_same(queue, model)


def _assert_same(queue: WaitingQueue[View], model: Model) -> None:
    assert order(queue) == model.order()
    waiting = [*model.waiting, *model.paused]
    assert len(queue) == len(waiting) == queue.work.num_requests
    assert queue.num_tokens == sum(view.num_tokens for view in waiting)
    assert queue.work.num_blocks == sum(view.worst_case_blocks for view in waiting)
    assert len(queue._admitted) == len(model.running)
    assert all(queue.get(view.stream_id) is view for view in waiting)


@settings(max_examples=30, deadline=None)
@given(OPERATIONS)
def test_one_walk_is_the_order_of_admission_one_by_one(operations: list[tuple[str, int, str, int]]) -> None:
    queue = queue_of(*(View(i, tenant, size + 1, priority) for i, (_, size, tenant, priority) in enumerate(operations)))
    foretold = order(queue)
    assert [admit_next(queue).stream_id for _ in range(len(queue))] == foretold
