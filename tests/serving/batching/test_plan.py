from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.serving.batching.plan import BatchPlan, BatchPolicy, WaitingRequest, plan_batch


@dataclass
class Row(WaitingRequest):
    rows: int = 1
    key: object = None
    enqueued_ns: int = 0


def policy(max_rows: int = 8, preferred: Sequence[int] = (4, 8), delay_ns: int = 100) -> BatchPolicy:
    return BatchPolicy(True, max_rows, frozenset(preferred), max(preferred), delay_ns)


def test_nothing_waits() -> None:
    assert plan_batch([], policy(), 0) == BatchPlan(0)


@pytest.mark.parametrize(
    ("rows", "size"),
    [
        ([1] * 4, 4),
        ([1] * 6, 4),
        ([1] * 8, 8),
        ([1] * 12, 8),
        ([3, 1, 4], 3),
        ([4, 3], 1),
        ([8], 1),
    ],
)
def test_the_largest_preferred_batch_goes_without_delay(rows: list[int], size: int) -> None:
    assert plan_batch([Row(each) for each in rows], policy(), now_ns=0).size == size


def test_less_than_a_preferred_batch_waits_for_the_delay_of_the_oldest() -> None:
    waiting = [Row(enqueued_ns=1000), Row(enqueued_ns=1050)]
    assert plan_batch(waiting, policy(), now_ns=1099) == BatchPlan(0, 1100)
    assert plan_batch(waiting, policy(), now_ns=1100).size == 2


def test_after_the_delay_all_that_fits_goes_not_only_a_preferred_size() -> None:
    assert plan_batch([Row()] * 6, policy(), now_ns=100).size == 6


def test_without_delay_whatever_waits_goes() -> None:
    assert plan_batch([Row()] * 3, policy(delay_ns=0), now_ns=0).size == 3
    assert plan_batch([Row()] * 6, policy(delay_ns=0), now_ns=0).size == 4


def test_a_request_that_cannot_join_closes_the_batch() -> None:
    assert plan_batch([Row(key="a"), Row(key="b"), Row(key="a")], policy(), now_ns=0).size == 1
    assert plan_batch([Row(5), Row(4)], policy(preferred=[8]), now_ns=0).size == 1


def test_outgrowing_every_preferred_size_sends_what_was_there() -> None:
    assert plan_batch([Row(3), Row(3)], policy(preferred=[4]), now_ns=0).size == 1


def test_more_rows_than_any_preferred_size_go_at_once() -> None:
    assert plan_batch([Row(6)], policy(preferred=[4]), now_ns=0).size == 1


def test_the_oldest_counts_though_a_higher_priority_stands_before_it() -> None:
    waiting = [Row(enqueued_ns=90), Row(enqueued_ns=0)]
    assert plan_batch(waiting, policy(), now_ns=100).size == 2


rows = st.builds(Row, st.integers(1, 8), st.sampled_from("ab"), st.integers(0, 300))
policies = st.builds(
    policy,
    st.just(8),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.sampled_from([0, 50, 200]),
)


@given(st.lists(rows, max_size=20), policies, st.integers(300, 600))
def test_promises(waiting: list[Row], given_policy: BatchPolicy, now_ns: int) -> None:
    plan = plan_batch(waiting, given_policy, now_ns)
    batch = waiting[: plan.size]
    assert sum(each.rows for each in batch) <= given_policy.max_rows
    assert len({each.key for each in batch}) <= 1
    if waiting and plan.size == 0:
        # It waits only while it may grow, and no longer than the delay of the oldest.
        assert now_ns < plan.look_again_ns == min(each.enqueued_ns for each in waiting) + given_policy.delay_ns
        assert sum(each.rows for each in waiting) < given_policy.max_rows


@given(st.lists(rows, min_size=1, max_size=30), policies)
def test_no_request_starves(waiting: list[Row], given_policy: BatchPolicy) -> None:
    late_ns = 10_000
    left = waiting
    while left:
        plan = plan_batch(left, given_policy, late_ns)
        assert plan.size > 0
        left = left[plan.size :]
