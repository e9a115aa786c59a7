"""Our planner admits the sequences that TensorRT-LLM admits under GUARANTEED_NO_EVICT, step for step: without reuse as
its recorded traces have it, with reuse as its capacity rule from 1.3 on decides over physical blocks.

The traces were recorded from its own schedulers (tests/data/tensorrt_llm/README.md). Each step our planner is asked on
the state that the trace has reached. The batches differ where it is meant: a context that does not fit whole runs up to
the last token of the budget here, there up to a multiple of the block size, or, without chunking, not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings

from sluice.engine.blocks import blocks_for
from sluice.engine.scheduling.planner import AdmissionCandidate, StepLimits, StepPlan, find_policy, plan_step
from tests import paths
from tests.stand_ins.scheduler_traces import Simulation, Step, Trace, Workload, run, schedule_as_stand_in, workloads
from tests.stand_ins.tensorrt_llm._stand_in.kv_cache import Prefix
from tests.stand_ins.tensorrt_llm._stand_in.schedulers import Load, Stage
from tests.stand_ins.workloads import workloads as drawn_workloads

DATA = paths.DATA / "tensorrt_llm" / "scheduler_traces.json"
TRACES = {trace.workload.name: trace for trace in msgspec.json.decode(DATA.read_bytes(), type=list[Trace])}
NO_EVICT = [name for name, trace in TRACES.items() if trace.workload.policy == "GUARANTEED_NO_EVICT"]
POLICY = find_policy("guaranteed_no_evict")
WHOLE = ["roomy", "tight_cache", "head_of_line", "few_places", "early_ends", "cancelled", "crowd"]
"""Workloads whose contexts always run whole."""


@dataclass(frozen=True, slots=True)
class View:
    """A request as our planner sees it, with the reference's worst case: blocks for prompt and max_tokens."""

    load: Load
    block_size: int
    priority: int = 0

    @property
    def request_id(self) -> int:
        return self.load.request_id

    @property
    def num_tokens_left(self) -> int:
        return max(self.load.num_prompt - self.load.num_prefilled, 1)

    def max_step_tokens(self, num_tokens_left: int) -> int:
        return num_tokens_left

    @property
    def num_drafts(self) -> int:
        return 0

    @property
    def worst_case_blocks(self) -> int:
        return blocks_for(self.load.num_prompt + self.load.max_new_tokens, self.block_size)

    @property
    def num_allocated_blocks(self) -> int:
        return self.load.held_per_beam

    @property
    def num_next_blocks(self) -> int:
        return blocks_for(self.load.num_tokens, self.block_size) - self.load.held_per_beam


class Planner:
    """Our planner over a simulation, with the sequences that it has admitted so far."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._running: list[int] = []

    def plan(
        self, active: Sequence[Load], num_free_blocks: int, prefixes: Mapping[int, Prefix] | None = None
    ) -> StepPlan[View]:
        """Plan one step and record the admitted sequences. `prefixes` has what the cache holds of those that wait."""
        views = {load.request_id: View(load, self.workload.tokens_per_block) for load in active}
        running = [views[request_id] for request_id in self._running if request_id in views]
        started = {view.request_id for view in running}
        fresh = [view for view in views.values() if view.request_id not in started]
        waiting = candidates(fresh, running, prefixes or {})
        limits = StepLimits(self.workload.max_batch_size, self.workload.max_num_tokens, num_free_blocks)
        step = plan_step(running, waiting, limits, POLICY, lambda view: view.num_allocated_blocks)
        self._running = [view.request_id for view in running] + admitted(step)
        return step


def candidates(
    waiting: list[View], running: list[View], prefixes: Mapping[int, Prefix]
) -> Iterator[AdmissionCandidate[View]]:
    """Yield those that wait, with what they can share now or a step later."""
    in_the_making = {view.load.first_block for view in running if view.load.stage is not Stage.GENERATION}
    for view in waiting:
        blocks, num_held, missing = prefixes.get(view.request_id, Prefix((), 0, None))
        is_delayed = missing is not None and missing in in_the_making
        if not is_delayed:
            in_the_making.add(missing)
        yield AdmissionCandidate(view, view.num_tokens_left, blocks, len(blocks) - num_held, is_delayed)


def admitted(step: StepPlan[View]) -> list[int]:
    return [candidate.sequence.request_id for candidate in step.admitted]


def batch_of(step: StepPlan[View]) -> dict[int, int]:
    """Return the number of tokens by request."""
    decode = {view.request_id: 1 for view in step.decode}
    return decode | {chunk.sequence.request_id: chunk.num_tokens for chunk in step.prefill}


def recorded_batch(step: Step) -> dict[int, int]:
    return dict.fromkeys(step.generations, 1) | dict(step.contexts)


def test_the_stand_in_schedules_as_the_reference() -> None:
    assert [run(workload, schedule_as_stand_in) for workload in workloads()] == list(TRACES.values())


@pytest.mark.parametrize("name", NO_EVICT)
def test_admissions_are_the_references_step_for_step(name: str) -> None:
    trace = TRACES[name]
    planner, simulation = Planner(trace.workload), Simulation(trace.workload)
    fitted: set[int] = set()

    for number, step in enumerate(trace.steps):
        simulation.begin()
        plan = planner.plan(list(simulation.active.values()), simulation.num_free_blocks)
        fresh = [request_id for request_id in step.fitting if request_id not in fitted]
        assert admitted(plan) == fresh, number
        assert not plan.preempted
        fitted.update(fresh)
        simulation.apply(step)

    assert fitted


@pytest.mark.parametrize("name", NO_EVICT)
def test_batches_differ_only_where_a_context_does_not_fit_whole(name: str) -> None:
    trace = TRACES[name]
    planner, simulation = Planner(trace.workload), Simulation(trace.workload)

    for number, step in enumerate(trace.steps):
        simulation.begin()
        plan = planner.plan(list(simulation.active.values()), simulation.num_free_blocks)
        own, reference = batch_of(plan), recorded_batch(step)
        assert set(step.generations) <= own.keys(), number
        is_whole = sum(view.num_tokens_left for view in views_of(plan)) <= trace.workload.max_num_tokens
        if is_whole:
            assert own == reference, number
        else:
            assert sum(own.values()) == trace.workload.max_num_tokens, number
            assert sum(reference.values()) <= trace.workload.max_num_tokens, number
        if not is_whole and trace.workload.chunking == "FIRST_COME_FIRST_SERVED":
            unused = trace.workload.max_num_tokens - sum(reference.values())
            assert unused < trace.workload.tokens_per_block, number
        simulation.apply(step)


@settings(max_examples=30)
@given(workload=drawn_workloads(has_chunks=False, always_has_credit=True))
def test_with_shared_blocks_admissions_are_the_references_step_for_step(workload: Workload) -> None:
    planner, simulation = Planner(workload), Simulation(workload)
    fitted: set[int] = set()

    while not simulation.is_over:
        simulation.begin()
        active, free = list(simulation.active.values()), simulation.num_free_blocks
        if len(active) > 2 * workload.max_batch_size:
            return  # our planner ends its search before the last of so many, the reference does not
        step = schedule_as_stand_in(workload, active, free)
        fresh = [request_id for request_id in step.fitting if request_id not in fitted]
        assert admitted(planner.plan(active, free, simulation.prefixes)) == fresh, simulation.number
        fitted.update(fresh)
        simulation.apply(step)

    assert simulation.number < workload.max_steps


def views_of(plan: StepPlan[View]) -> list[View]:
    """Return the requests that get tokens in this step."""
    return [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]


@pytest.mark.parametrize("name", WHOLE)
def test_left_to_itself_our_planner_runs_the_whole_workload_in_the_same_steps(name: str) -> None:
    """Admissions and batches feed back: every step and every end is the reference's."""
    trace = TRACES[name]
    planner = Planner(trace.workload)
    fitted: list[int] = []

    def schedule(workload: Workload, active: Sequence[Load], num_free_blocks: int) -> Step:
        there = {load.request_id: load for load in active}
        plan = planner.plan(active, num_free_blocks)
        fitted[:] = [request_id for request_id in fitted if request_id in there] + admitted(plan)
        tokens = batch_of(plan)
        contexts = [(i, n) for i, n in tokens.items() if there[i].num_prefilled < there[i].num_prompt]
        generations = [i for i in fitted if i in tokens and there[i].num_prefilled == there[i].num_prompt]
        return Step(tuple(fitted), tuple(sorted(contexts)), tuple(generations))

    own = run(trace.workload, schedule)

    assert [recorded_batch(step) for step in own.steps] == [recorded_batch(step) for step in trace.steps]
    assert [set(step.fitting) for step in own.steps] == [set(step.fitting) for step in trace.steps]


def test_the_head_of_the_line_holds_up_the_others() -> None:
    """The traces prove something only if they have steps in which a sequence waits that would fit."""
    trace = TRACES["head_of_line"]
    firsts: dict[int, int] = {}
    for number, step in enumerate(trace.steps):
        for request_id in step.fitting:
            firsts.setdefault(request_id, number)

    assert firsts[1] > 30 and all(firsts[small] >= firsts[1] for small in range(2, 8))
    assert {request_id for step in TRACES["never_fits"].steps for request_id in step.fitting} == {0, 1, 2}
