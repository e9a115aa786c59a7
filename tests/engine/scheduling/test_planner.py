from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.config import SchedulerPolicy
from sluice.engine.scheduling.planner import (
    FIRST_CHUNK,
    LARGEST_CHUNK,
    LONGEST_STEP_S,
    MAX_RATIO,
    TARGET_STEP_S,
    AdmissionCandidate,
    ChunkLimits,
    StepLimits,
    StepPlan,
    StepTimes,
    choose_chunk,
    find_policy,
    plan_step,
)


@dataclass(frozen=True)
class View:
    """A sequence as the planner sees it."""

    number: int
    num_tokens_left: int
    worst_case_blocks: int
    num_allocated_blocks: int = 0
    num_shared: int = 0
    """How many of them others hold too."""
    num_drafts: int = 0
    num_next_blocks: int = 0
    most: int = 1000
    priority: int = 0

    def max_step_tokens(self, num_tokens_left: int) -> int:
        return min(num_tokens_left, self.most)


def views(first: int, sizes: list[tuple[int, int]]) -> list[View]:
    return [View(first + i, left, blocks) for i, (left, blocks) in enumerate(sizes)]


def fresh(sequences: list[View]) -> list[AdmissionCandidate[View]]:
    return [AdmissionCandidate(view, view.num_tokens_left, (), 0, False) for view in sequences]


def plan(
    running: list[View],
    waiting: list[AdmissionCandidate[View]],
    limits: StepLimits,
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
) -> StepPlan[View]:
    return plan_step(
        running, waiting, limits, find_policy(policy), lambda view: view.num_allocated_blocks - view.num_shared
    )


def admitted(step: StepPlan[View]) -> list[int]:
    return [candidate.sequence.number for candidate in step.admitted]


def test_decode_comes_before_prefill_and_prompts_share_the_rest() -> None:
    running = views(0, [(1, 1), (50, 2), (1, 1)])
    waiting = fresh(views(10, [(30, 1), (30, 1)]))
    step = plan(running, waiting, StepLimits(max_num_seqs=8, max_num_batched_tokens=64, num_free_blocks=100))
    assert [s.number for s in step.decode] == [0, 2]
    assert [(c.sequence.number, c.num_tokens) for c in step.prefill] == [(1, 50), (10, 12)]
    assert admitted(step) == [10, 11]


def test_prompts_of_a_lower_priority_value_come_first() -> None:
    running = [View(0, 40, 2, priority=1), View(1, 40, 2)]
    waiting = fresh([View(2, 30, 1, priority=-1), View(3, 30, 1)])
    step = plan(running, waiting, StepLimits(max_num_seqs=8, max_num_batched_tokens=90, num_free_blocks=100))
    assert [(c.sequence.number, c.num_tokens) for c in step.prefill] == [(2, 30), (1, 40), (3, 20)]


def test_the_first_misfit_blocks_those_behind_it() -> None:
    step = plan([], fresh(views(0, [(2, 3), (2, 8), (2, 1)])), StepLimits(8, 64, num_free_blocks=10))
    assert admitted(step) == [0]


def test_admission_stops_at_max_num_seqs() -> None:
    step = plan(views(0, [(1, 1)]), fresh(views(5, [(2, 1)] * 5)), StepLimits(3, 64, 100))
    assert admitted(step) == [5, 6]


def test_blocks_that_others_hold_are_counted_once() -> None:
    running = [View(0, 1, worst_case_blocks=8, num_allocated_blocks=6)]
    waiting = views(1, [(2, 8)])
    shared = AdmissionCandidate(waiting[0], 2, (0, 1, 2, 3, 4), num_unreferenced=0, is_delayed=False)
    limits = StepLimits(8, 64, num_free_blocks=5)
    assert admitted(plan(running, fresh(waiting), limits)) == []
    assert admitted(plan(running, [shared], limits)) == [1], "8 - 5 shared beside the 2 that are promised"
    revived = AdmissionCandidate(waiting[0], 2, (0, 1, 2, 3, 4), num_unreferenced=1, is_delayed=False)
    assert admitted(plan(running, [revived], limits)) == [], (
        "a cached block that nobody holds comes out of the free ones"
    )


def test_who_waits_for_a_shared_prefix_holds_up_nobody() -> None:
    first, second = views(0, [(9, 1), (9, 1)])
    step = plan(
        [],
        [AdmissionCandidate(first, 9, (), 0, True), AdmissionCandidate(second, 9, (), 0, False)],
        StepLimits(8, 64, 100),
    )
    assert admitted(step) == [1]


@pytest.mark.parametrize("policy", [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.MAX_UTILIZATION])
def test_who_waits_for_a_shared_prefix_takes_no_place_from_others(policy: SchedulerPolicy) -> None:
    delayed = [AdmissionCandidate(view, 9, (), 0, True) for view in views(0, [(9, 1)] * 3)]
    step = plan([], delayed + fresh(views(5, [(9, 1)] * 3)), StepLimits(2, 64, 100), policy)
    assert admitted(step) == [5], "it looks at no more candidates than the free places and max_num_seqs"
    step = plan([], delayed[:2] + fresh(views(5, [(9, 1)] * 3)), StepLimits(2, 64, 100), policy)
    assert admitted(step) == [5, 6]


def test_a_static_batch_starts_when_the_last_is_over() -> None:
    waiting = fresh(views(5, [(2, 1)] * 3))
    limits = StepLimits(8, 64, 100)
    assert admitted(plan(views(0, [(1, 1)]), waiting, limits, SchedulerPolicy.STATIC_BATCH)) == []
    assert admitted(plan([], waiting, limits, SchedulerPolicy.STATIC_BATCH)) == [5, 6, 7]


def test_max_utilization_pauses_the_youngest_and_admits_on_current_need() -> None:
    running = [View(i, 1, 50, num_allocated_blocks=2, num_next_blocks=1) for i in range(3)]
    waiting = fresh([View(9, 4, worst_case_blocks=50, num_next_blocks=1)])
    tight = plan(running, waiting, StepLimits(8, 64, num_free_blocks=1), SchedulerPolicy.MAX_UTILIZATION)
    assert [view.number for view in tight.preempted] == [2]
    assert [view.number for view in tight.decode] == [0, 1]
    assert admitted(tight) == []
    roomy = plan(running, waiting, StepLimits(8, 64, num_free_blocks=7), SchedulerPolicy.MAX_UTILIZATION)
    assert (roomy.preempted, admitted(roomy)) == ((), [9]), "far less than the 50 that each may come to need"
    full = plan(running, waiting, StepLimits(8, 64, num_free_blocks=6), SchedulerPolicy.MAX_UTILIZATION)
    assert admitted(full) == [], "a block stays for each of the running ones"
    sharing = [replace(view, num_shared=2) for view in running]
    tight = plan(sharing, waiting, StepLimits(8, 64, num_free_blocks=1), SchedulerPolicy.MAX_UTILIZATION)
    assert [view.number for view in tight.preempted] == [2, 1], "blocks that others hold too are not free for it"


def test_drafts_get_what_decode_leaves_and_prompts_what_drafts_leave() -> None:
    running = [View(0, 1, 9, num_drafts=4), View(1, 1, 9), View(2, 1, 9, num_drafts=4), View(3, 40, 9)]
    step = plan(running, [], StepLimits(4, 16, 100))
    assert step.num_drafts == (4, 0, 4)
    assert [(c.sequence.number, c.num_tokens) for c in step.prefill] == [(3, 5)]
    assert plan(running, [], StepLimits(4, 8, 100)).num_drafts == (4, 0, 1)
    assert plan(running[1:2], [], StepLimits(4, 8, 100)).num_drafts == ()


@pytest.mark.parametrize(
    ("decoding", "most_alone", "expected"),
    [(1, None, [10]), (0, None, [40, 24]), (1, 20, [10]), (0, 20, [20])],
)
def test_prompts_have_limits_of_their_own_beside_decode_and_without(
    decoding: int, most_alone: int | None, expected: list[int]
) -> None:
    limits = StepLimits(4, 64, 100, max_prefill_tokens=10, max_tokens_alone=most_alone)
    step = plan([View(0, 1, 9)] * decoding + [View(1, 40, 9), View(2, 40, 9)], [], limits)
    assert [chunk.num_tokens for chunk in step.prefill] == expected


def test_a_sequence_may_want_its_context_in_small_pieces() -> None:
    step = plan([View(0, 40, 9, most=1), View(1, 40, 9)], [], StepLimits(4, 64, 100))
    assert [(c.sequence.number, c.num_tokens) for c in step.prefill] == [(0, 1), (1, 40)]


sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 12)), max_size=40)


@given(sizes, sizes, st.integers(1, 16), st.integers(0, 256), st.integers(1, 60))
def test_no_step_takes_more_than_it_may(
    running_sizes: list[tuple[int, int]],
    waiting_sizes: list[tuple[int, int]],
    max_num_seqs: int,
    extra_tokens: int,
    num_blocks: int,
) -> None:
    limits = StepLimits(max_num_seqs, max_num_seqs + extra_tokens, num_blocks)
    running: list[View] = []
    for view in views(0, running_sizes):  # as many as could have been admitted before
        if len(running) < max_num_seqs and sum(v.worst_case_blocks for v in (*running, view)) <= num_blocks:
            running.append(view)
    waiting = views(1000, waiting_sizes)
    step = plan(running, fresh(waiting), limits)

    started = [candidate.sequence for candidate in step.admitted]
    everyone = [*running, *started]
    assert sum(view.worst_case_blocks for view in everyone) <= num_blocks
    assert len(everyone) <= max_num_seqs
    assert started == waiting[: len(started)], "first come, first served"
    assert step.preempted == ()
    num_tokens = len(step.decode) + sum(chunk.num_tokens for chunk in step.prefill)
    assert num_tokens <= limits.max_num_batched_tokens
    assert set(step.decode) == {view for view in everyone if view.num_tokens_left == 1}, "decode always runs"
    assert all(0 < chunk.num_tokens <= chunk.sequence.num_tokens_left for chunk in step.prefill)
    assert all(chunk.num_tokens == chunk.sequence.num_tokens_left for chunk in step.prefill[:-1])
    if running or (waiting and waiting[0].worst_case_blocks <= num_blocks):
        assert not step.is_empty, "whoever can move does"


BY_LOAD = ChunkLimits(32, LARGEST_CHUNK, is_chosen_by_load=True)
GIVEN = ChunkLimits(32, 700)

FAST, MIDDLING, SLOW = StepTimes(0.002, 2e-6), StepTimes(0.004, 1e-4), StepTimes(0.4, 5e-3)


def test_a_fast_model_takes_the_largest_chunk_beside_streams_or_without() -> None:
    assert [choose_chunk(FAST, BY_LOAD, is_decoding=each) for each in (True, False)] == [LARGEST_CHUNK] * 2


def test_beside_streams_a_step_keeps_its_target() -> None:
    chunk = choose_chunk(MIDDLING, BY_LOAD, is_decoding=True)
    assert 0.004 + chunk * 1e-4 == pytest.approx(TARGET_STEP_S, abs=1e-4)


def test_without_streams_a_step_may_take_longer_but_not_for_ever() -> None:
    assert choose_chunk(MIDDLING, BY_LOAD, is_decoding=False) == LARGEST_CHUNK
    assert choose_chunk(SLOW, BY_LOAD, is_decoding=False) == pytest.approx(LONGEST_STEP_S / 5e-3, abs=1)


def test_a_large_model_gives_prompts_a_multiple_of_decode() -> None:
    assert choose_chunk(SLOW, BY_LOAD, is_decoding=True) == pytest.approx(MAX_RATIO * 0.4 / 5e-3, abs=1)


@pytest.mark.parametrize("is_decoding", [True, False])
def test_a_chunk_has_at_least_a_block(is_decoding: bool) -> None:
    assert choose_chunk(StepTimes(0.001, 1.0), BY_LOAD, is_decoding=is_decoding) == 32


@pytest.mark.parametrize("is_decoding", [True, False])
def test_before_a_cost_is_known_the_chunk_is_middling(is_decoding: bool) -> None:
    assert choose_chunk(StepTimes(), BY_LOAD, is_decoding=is_decoding) == FIRST_CHUNK
    assert choose_chunk(StepTimes(), ChunkLimits(16, 64, is_chosen_by_load=True), is_decoding=is_decoding) == 64


def test_a_size_that_was_given_stands() -> None:
    for costs in (StepTimes(), FAST, MIDDLING, SLOW):
        assert choose_chunk(costs, GIVEN, is_decoding=False) == 700
    assert choose_chunk(StepTimes(), GIVEN, is_decoding=True) == 700


@pytest.mark.parametrize("name", SchedulerPolicy)
def test_every_name_has_a_policy(name: SchedulerPolicy) -> None:
    assert find_policy(name).name is name
    assert find_policy(name.value) is find_policy(name)


def test_the_guarantee_and_in_flight_batching_by_policy() -> None:
    properties = {
        name: (find_policy(name).reserves_worst_case, find_policy(name).is_in_flight) for name in SchedulerPolicy
    }
    assert properties == {
        SchedulerPolicy.GUARANTEED_NO_EVICT: (True, True),
        SchedulerPolicy.MAX_UTILIZATION: (False, True),
        SchedulerPolicy.STATIC_BATCH: (True, False),
    }
