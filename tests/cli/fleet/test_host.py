"""One engine of a fleet: it is started again where it ends, and drains at the end."""

import os
import signal
from collections.abc import Iterator

import pytest

from sluice.cli.fleet import host as hosts
from sluice.cli.fleet.host import EngineHost, HostedEngineState
from tests.paths import TESTS
from tests.waiting import PATIENCE_S, wait_for

STAND_IN = str(TESTS / "ray" / "stand_in.py")


@pytest.fixture
def host() -> Iterator[EngineHost]:
    running = EngineHost([STAND_IN], "127.0.0.1")
    yield running
    running.kill()


@pytest.mark.slow
def test_an_engine_that_is_killed_comes_again_elsewhere(host: EngineHost) -> None:
    first = wait_for(host.status, lambda status: status.state is HostedEngineState.READY)
    assert (first.num_restarts, first.problem) == (0, "")
    os.kill(first.pid, signal.SIGKILL)
    told = wait_for(host.status, lambda status: bool(status.problem))
    assert told.problem.startswith("the engine ended with code -9")
    second = wait_for(host.status, lambda status: status.state is HostedEngineState.READY)
    assert (second.num_restarts, second.problem) == (1, "")
    assert second.address != first.address


@pytest.mark.slow
def test_an_engine_that_drains_ends_for_good(host: EngineHost) -> None:
    wait_for(host.status, lambda status: status.state is HostedEngineState.READY)
    host.drain()
    host.drain()
    wait_for(host.status, lambda status: status.state is HostedEngineState.ENDED)
    assert host.status().state is HostedEngineState.ENDED


def test_one_that_never_started_has_nothing_to_drain() -> None:
    host = EngineHost([STAND_IN], "127.0.0.1")
    host.drain()
    assert host.status().state is HostedEngineState.ENDED


@pytest.mark.slow
def test_the_delay_before_a_start_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "LONGEST_DELAY_S", 4.0)
    host = EngineHost(["-c", "raise SystemExit(3)"], "127.0.0.1")
    delays = []
    for _ in range(4):
        host._next_start = 0.0
        host._start()
        assert host._process is not None
        host._on_exit(host._process.wait(PATIENCE_S))
        delays.append(host._delay_s)
    assert delays == [1.0, 2.0, 4.0, 4.0]
    assert host.status().problem.startswith("the engine ended with code 3")
