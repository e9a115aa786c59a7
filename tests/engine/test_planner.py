from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.planner import plan_step
from engine.policies import Limits


@dataclass(frozen=True)
class View:
    """A sequence as the planner sees it."""

    number: int
    num_prompt_left: int
    worst_case_blocks: int


def views(first: int, sizes: list[tuple[int, int]]) -> list[View]:
    return [View(first + i, left, blocks) for i, (left, blocks) in enumerate(sizes)]


def test_decode_comes_before_prefill_and_prompts_share_the_rest() -> None:
    running = views(0, [(0, 1), (50, 2), (0, 1)])
    waiting = views(10, [(30, 1), (30, 1)])
    plan = plan_step(running, waiting, Limits(max_num_seqs=8, max_num_batched_tokens=64, usable_blocks=100))
    assert [s.number for s in plan.decode] == [0, 2]
    assert [(c.sequence.number, c.num_tokens) for c in plan.prefill] == [(1, 50), (10, 12)]
    assert [s.number for s in plan.admitted] == [10, 11]


def test_the_first_misfit_blocks_those_behind_it() -> None:
    waiting = views(0, [(1, 3), (1, 8), (1, 1)])
    plan = plan_step([], waiting, Limits(max_num_seqs=8, max_num_batched_tokens=64, usable_blocks=10))
    assert [s.number for s in plan.admitted] == [0]


def test_admission_stops_at_max_num_seqs() -> None:
    plan = plan_step(views(0, [(0, 1)]), views(5, [(1, 1)] * 5), Limits(3, 64, 100))
    assert [s.number for s in plan.admitted] == [5, 6]


sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), max_size=40)


@given(sizes, sizes, st.integers(1, 16), st.integers(0, 256), st.integers(1, 60))
def test_no_step_takes_more_than_it_may(
    running_sizes: list[tuple[int, int]],
    waiting_sizes: list[tuple[int, int]],
    max_num_seqs: int,
    extra_tokens: int,
    usable_blocks: int,
) -> None:
    limits = Limits(max_num_seqs, max_num_seqs + extra_tokens, usable_blocks)
    running: list[View] = []
    for view in views(0, running_sizes):  # as many as could have been admitted before
        if len(running) < max_num_seqs and sum(v.worst_case_blocks for v in (*running, view)) <= usable_blocks:
            running.append(view)
    waiting = views(1000, [(max(left, 1), blocks) for left, blocks in waiting_sizes])
    plan = plan_step(running, waiting, limits)

    everyone = [*running, *plan.admitted]
    assert sum(view.worst_case_blocks for view in everyone) <= usable_blocks
    assert len(everyone) <= max_num_seqs
    assert list(plan.admitted) == waiting[: len(plan.admitted)], "first come, first served"
    num_tokens = len(plan.decode) + sum(chunk.num_tokens for chunk in plan.prefill)
    assert num_tokens <= limits.max_num_batched_tokens
    assert set(plan.decode) == {view for view in running if view.num_prompt_left == 0}, "decode always runs"
    assert all(0 < chunk.num_tokens <= chunk.sequence.num_prompt_left for chunk in plan.prefill)
    assert all(chunk.num_tokens == chunk.sequence.num_prompt_left for chunk in plan.prefill[:-1])
    if running or (waiting and waiting[0].worst_case_blocks <= usable_blocks):
        assert not plan.is_empty, "whoever can move does"
