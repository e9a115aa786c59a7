"""Capacity policies as values; `test_planner` and `test_reference_traces` test their decisions."""

import pytest

from sluice.engine.config import SchedulerPolicy
from sluice.engine.scheduling.policies import find_policy


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
