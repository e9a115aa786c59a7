"""When requests are sent and what their times mean, on a clock that only the scripts advance."""

import asyncio
from collections.abc import Callable

import pytest

from sluice.load.config import Arrival
from sluice.load.driver import RECONNECT_PAUSE_S
from sluice.load.run import Run, run_load
from sluice.load.stream import RequestResult
from tests.load.scripted_server import ManualClock, Script, Wire, good_stream, load_config, run_against, serving


def run_on_clock(script_for: Callable[[ManualClock], Script], **settings: object) -> Run:
    async def scenario() -> Run:
        clock = ManualClock()
        async with serving(script_for(clock)) as server:
            return await run_load(load_config(server.url, **settings), clock=clock)

    return asyncio.run(scenario())


def timed_stream(clock: ManualClock) -> Script:
    """First token after 1 s, the others 0.25 s apart, the end 0.5 s after the last."""

    async def script(wire: Wire) -> None:
        wire.start_stream()
        for pause_s in (1.0, 0.25, 0.25):
            clock.advance(pause_s)
            await clock.seen(wire.token)
        clock.advance(0.5)
        wire.finish(3)

    return script


def test_times_of_one_request() -> None:
    (result,) = run_on_clock(timed_stream).results
    assert result.client_wait_s == 0.0
    assert result.ttft_s == 1.0
    assert list(result.event_times_s) == [1.0, 1.25, 1.5]
    assert result.e2e_s == 2.0
    assert result.tpot_s == 0.5


def by_index(run: Run) -> list[RequestResult]:
    return sorted(run.results, key=lambda result: result.planned.index)


def test_open_loop_counts_from_the_intended_send() -> None:
    """Ten a second, 2 s each, one in flight: the wait for a place is the client's, and it counts."""
    run = run_on_clock(
        timed_stream, request_rate=10.0, arrival=Arrival.CONSTANT, concurrency=1, num_requests=3, timeout_s=60.0
    )
    assert [r.intended_s for r in by_index(run)] == pytest.approx([0.0, 0.1, 0.2])
    assert [r.client_wait_s for r in by_index(run)] == pytest.approx([0.0, 1.9, 3.8])
    assert [r.ttft_s for r in by_index(run)] == pytest.approx([1.0, 2.9, 4.8])
    assert [r.e2e_s for r in by_index(run)] == pytest.approx([2.0, 3.9, 5.8])


def test_open_loop_does_not_wait_for_answers() -> None:
    """The server answers nobody until the last request is there: a closed loop would never get that far."""

    def stalled(clock: ManualClock) -> Script:
        all_here = asyncio.Event()

        async def script(wire: Wire) -> None:
            clock.advance(0.1)
            if wire.index == 4:
                all_here.set()
            await all_here.wait()
            await good_stream(wire)

        return script

    run = run_on_clock(stalled, request_rate=10.0, arrival=Arrival.CONSTANT, num_requests=5)
    assert run.summary.num_served == 5


def test_open_loop_ends_with_its_duration() -> None:
    def moving(clock: ManualClock) -> Script:
        async def script(wire: Wire) -> None:
            clock.advance(1.0)
            await good_stream(wire)

        return script

    run = run_on_clock(moving, request_rate=1.0, arrival=Arrival.CONSTANT, num_requests=None, duration_s=3.0)
    assert [r.intended_s for r in by_index(run)] == [0.0, 1.0, 2.0]


def test_closed_loop_ends_with_its_duration() -> None:
    run = run_on_clock(timed_stream, concurrency=1, num_requests=None, duration_s=3.0)
    assert [r.intended_s for r in by_index(run)] == [0.0, 2.0]


class EagerClock(ManualClock):
    """Nobody waits: time jumps to whatever moment is waited for."""

    async def sleep_until(self, moment: float) -> None:
        self.advance(max(0.0, moment - self._now))


def test_closed_loop_does_not_flood_a_server_that_breaks_connections() -> None:
    async def closes_at_once(wire: Wire) -> None:
        wire.writer.close()

    async def scenario() -> Run:
        async with serving(closes_at_once) as server:
            return await run_load(load_config(server.url, num_requests=3), clock=EagerClock())

    run = asyncio.run(scenario())
    assert [r.intended_s for r in by_index(run)] == pytest.approx([0.0, RECONNECT_PAUSE_S, 2 * RECONNECT_PAUSE_S])


def test_closed_loop_keeps_exactly_its_concurrency_in_flight() -> None:
    in_flight, seen = 0, set()
    is_full = asyncio.Event()

    async def script(wire: Wire) -> None:
        nonlocal in_flight
        in_flight += 1
        seen.add(in_flight)
        if in_flight == 4:
            is_full.set()
        await is_full.wait()
        in_flight -= 1
        await good_stream(wire)

    assert run_against(script, concurrency=4, num_requests=12).summary.num_served == 12
    assert max(seen) == 4


def test_an_interrupted_run_reports_what_it_has() -> None:
    async def scenario() -> Run:
        second_is_here = asyncio.Event()

        async def script(wire: Wire) -> None:
            if wire.index == 1:
                second_is_here.set()
                await asyncio.Event().wait()
            await good_stream(wire)

        async with serving(script) as server:
            run = asyncio.create_task(run_load(load_config(server.url, num_requests=5)))
            await second_is_here.wait()
            run.cancel()
            return await run

    run = asyncio.run(scenario())
    assert run.was_interrupted
    assert (run.summary.num_served, run.summary.num_requests) == (1, 1)
