"""The restart budget: when it is exhausted, and how the delays grow."""

from sluice.backoff import FIRST_DELAY_S, MAX_FUTILE_STARTS, RestartBudget


def test_the_first_restart_is_at_once_and_futile_ones_wait_ever_longer() -> None:
    budget = RestartBudget()
    budget.refill()
    assert budget.delay_s() == 0.0
    delays = []
    for _ in range(MAX_FUTILE_STARTS - 1):
        budget.spend()
        assert not budget.is_exhausted
        delays.append(budget.delay_s())
    assert delays == [FIRST_DELAY_S * 2**n for n in range(len(delays))]
    budget.spend()
    assert budget.is_exhausted


def test_an_engine_that_served_somebody_ends_the_count() -> None:
    budget = RestartBudget()
    for _ in range(MAX_FUTILE_STARTS - 1):
        budget.spend()
    budget.refill()
    budget.spend()
    assert not budget.is_exhausted
    assert budget.delay_s() == FIRST_DELAY_S


def test_a_culprit_makes_the_budget_last_longer_but_not_for_ever() -> None:
    budget = RestartBudget()
    for _ in range(2 * MAX_FUTILE_STARTS):
        budget.spend(has_culprit=True)
    assert not budget.is_exhausted
    for _ in range(2 * MAX_FUTILE_STARTS):
        budget.spend(has_culprit=True)
    assert budget.is_exhausted
