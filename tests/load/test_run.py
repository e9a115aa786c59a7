"""Several client processes: together they send what one would."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.load.config import Arrival, LoadConfigError, RequestPace
from sluice.load.run import Run, RunError, run_load
from sluice.load.shares import Share, shares_of
from sluice.load.workload import arrival_offsets
from tests.load.scripted_server import Script, Wire, good_stream, load_config, run_against, serving


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 30))
def test_shares_are_a_partition(num_processes: int, more: int) -> None:
    pace = RequestPace(concurrency=num_processes + more, num_requests=1)
    shares = shares_of(pace, num_processes)
    assert all(sum(share.owns(index) for share in shares) == 1 for index in range(100))
    parts = [share.part_of(num_processes + more) for share in shares]
    assert sum(parts) == num_processes + more
    # A process with more requests in flight has as much more to send.
    size = num_processes + more
    assert [len(list(itertools.takewhile(lambda each: each < 3 * size, share.indices()))) for share in shares] == [
        3 * part for part in parts
    ]


def bodies_of(script: Script, **settings: Any) -> tuple[Run, list[Any]]:
    async def scenario() -> tuple[Run, list[Any]]:
        async with serving(script) as server:
            run = await run_load(load_config(server.url, **settings))
            return run, sorted(wire.body["prompt"] for wire in server.wires)

    return asyncio.run(scenario())


def indices(run: Run) -> Sequence[int]:
    return sorted(result.planned.index for result in run.results)


def test_two_processes_send_the_requests_of_one_at_the_same_times() -> None:
    settings = {"request_rate": 200.0, "arrival": Arrival.POISSON, "num_requests": 12, "seed": 5, "model": None}
    alone, of_one = bodies_of(good_stream, **settings)
    together, of_two = bodies_of(good_stream, **settings, num_processes=2, warmup=0)
    assert of_two == of_one
    assert indices(together) == indices(alone) == list(range(12))
    start_s = min(result.intended_s for result in together.results)
    offsets = dict(zip(range(12), arrival_offsets(together.config.pace, 5), strict=False))
    for result in together.results:
        assert result.intended_s - start_s == pytest.approx(offsets[result.planned.index], abs=1e-9)
        assert result.started_s >= result.intended_s
    assert together.model == "first"
    assert together.summary.output_tokens == 36
    assert 0 < together.busiest_cpu_s < together.client_cpu_s


def test_processes_share_a_closed_loop_and_its_warm_up() -> None:
    in_flight, most = 0, 0
    is_full = asyncio.Event()

    async def script(wire: Wire) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 3:
            is_full.set()
        await is_full.wait()
        in_flight -= 1
        await good_stream(wire)

    run, bodies = bodies_of(script, concurrency=3, num_requests=9, num_processes=2, warmup=3)
    assert indices(run) == list(range(9))
    assert (len(bodies), most) == (12, 3)


async def broken(wire: Wire) -> None:
    await wire.whole("500 Internal Server Error", b"oops")


def test_a_warm_up_that_fails_in_a_process_ends_the_run() -> None:
    with pytest.raises(RunError, match="a warm-up request failed: http_500: oops"):
        run_against(broken, concurrency=2, num_processes=2, warmup=2)


def test_an_interrupted_run_has_what_was_measured() -> None:
    async def scenario() -> Run:
        is_stuck = asyncio.Event()

        async def script(wire: Wire) -> None:
            if wire.index == 3:
                is_stuck.set()
                await asyncio.Event().wait()
            await good_stream(wire)

        async with serving(script) as server:
            config = load_config(server.url, concurrency=2, num_requests=None, duration_s=300.0, num_processes=2)
            run = asyncio.create_task(run_load(config))
            await is_stuck.wait()
            run.cancel()
            return await run

    run = asyncio.run(scenario())
    assert run.was_interrupted
    assert run.summary.num_served >= 3


def test_more_processes_than_requests_in_flight_are_refused() -> None:
    with pytest.raises(LoadConfigError, match="3 processes for a concurrency of 2"):
        load_config("http://127.0.0.1:1", concurrency=2, num_processes=3)


def test_the_whole_is_the_share_of_one_process() -> None:
    assert list(itertools.islice(Share().indices(), 3)) == [0, 1, 2]
    assert Share().part_of(7) == 7
