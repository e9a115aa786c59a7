"""Judgements of what a live server under load does not do by itself: lost engines, stores that are away."""

import pytest

from sluice.gateway.watch.live.bounds import BoundKind, Health, LiveFinding, Observation, judge
from sluice.gateway.watch.live.findings import Severity
from sluice.gateway.watch.live.scrape import Change, parse_scrape

PAGE = """\
# TYPE sluice_engine_restarts counter
sluice_engine_restarts_total{{model="rill"}} {restarts}
# TYPE sluice_engine_poisoned_requests counter
sluice_engine_poisoned_requests_total{{model="rill"}} {poisoned}
"""


def judged(
    restarts: int = 0, poisoned: int = 0, *, reason: str = "", degraded: tuple[str, ...] = ()
) -> list[LiveFinding]:
    """Judge ten seconds in which the counters rose from 3 by so much."""
    before = parse_scrape(PAGE.format(restarts=3, poisoned=3), 100.0)
    after = parse_scrape(PAGE.format(restarts=3 + restarts, poisoned=3 + poisoned), 110.0)
    return judge(Observation(Change(before, after), Health(reason, list(degraded))))


def test_what_happened_earlier_is_no_finding() -> None:
    [found] = judged()
    assert found.bound is BoundKind.NONE and found.level is Severity.OK


def test_an_engine_was_replaced_meanwhile() -> None:
    [found] = judged(restarts=2)
    assert found.bound is BoundKind.ENGINE_LOST and found.level is Severity.FAIL
    assert found.subject == "rill" and "replaced 2 times in 10 s" in found.text
    assert "--kv-cache-memory" in found.remedy


def test_requests_crash_engines() -> None:
    [found] = judged(poisoned=1)
    assert found.bound is BoundKind.ENGINE_LOST and found.level is Severity.WARN
    assert "1 requests failed because engines crashed on them" in found.text


def test_what_health_names_beside_replicas_is_degraded() -> None:
    found = judged(restarts=1, degraded=("the store of quotas is away", "replica b of rill does not serve"))
    assert [each.bound for each in found] == [BoundKind.REPLICA_LOST, BoundKind.ENGINE_LOST, BoundKind.DEGRADED]
    assert found[-1].text == "the store of quotas is away" and found[-1].level is Severity.WARN


@pytest.mark.parametrize(
    "reason", ["the engine is restarting", "an engine sleeps; POST /wake_up", "the server is loading its models"]
)
def test_a_server_that_takes_no_requests_says_why(reason: str) -> None:
    found = judged(restarts=1, reason=reason)
    assert [each.bound for each in found] == [BoundKind.UNREADY, BoundKind.ENGINE_LOST], "the gravest comes first"
    assert found[0].level is Severity.FAIL and found[0].text == f"it takes no requests: {reason}"
    assert "503" in found[0].remedy


def test_each_thing_that_health_names_is_told() -> None:
    texts = ("HTTP worker 2 is not there; the host answers for it", "the ledger cannot be written: disk full")
    found = judged(degraded=texts)
    assert [(each.bound, each.text) for each in found] == [(BoundKind.DEGRADED, text) for text in texts]
    assert all(each.level is Severity.WARN and each.remedy for each in found)
