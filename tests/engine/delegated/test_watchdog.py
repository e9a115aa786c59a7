"""Engines that hang or are ill."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

import msgspec
import pytest

from sluice.engine.delegated.in_flight import InFlightListener, InFlightTable
from sluice.engine.delegated.interface import EngineLost, ResponseDelta
from sluice.engine.delegated.sequence import DelegatedSequence
from sluice.engine.delegated.watchdog import Watchdog, stall_timeout_s, warm_up
from sluice.engine.types import FinishReason
from sluice.errors import SluiceError
from tests.clock import ManualClock
from tests.engine.delegated.fake_runtime import (
    INFO,
    FakeHandle,
    FakeRuntime,
    SilentHandle,
    make_request,
    make_sequence,
)
from tests.waiting import PATIENCE_S


class Listener(InFlightListener):
    """Ignores all outcomes."""

    def on_response(self) -> None: ...

    def on_delta(self, sequence: DelegatedSequence, delta: ResponseDelta) -> None: ...

    def on_failure(self, sequence: DelegatedSequence, error: SluiceError) -> None: ...

    def on_removed(self, sequence: DelegatedSequence) -> None: ...

    def on_lost(self, error: Exception) -> None: ...


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_stall_timeout_is_a_time(text: str) -> None:
    with pytest.raises(SluiceError, match="stall_timeout_s must be a number of seconds above 0"):
        stall_timeout_s({"stall_timeout_s": text})


def test_the_stall_timeout_is_a_minute_where_nobody_says() -> None:
    assert stall_timeout_s({}) == 60.0
    assert stall_timeout_s({"stall_timeout_s": "2.5"}) == 2.5


def watch(
    runtime: FakeRuntime, clock: ManualClock[float], *requests: DelegatedSequence, has_iterations: bool = False
) -> Watchdog:
    table = InFlightTable(runtime, Listener(), clock)
    for each in requests:
        table.submit(each)
    return Watchdog(runtime, INFO, table, lambda now: has_iterations, clock, 2.5)


async def run_once(watchdog: Watchdog) -> None:
    """Run its first check."""
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if task.done():
        task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_stall() -> None:
    clock = ManualClock(10.0)
    watchdog = watch(FakeRuntime(lambda request: SilentHandle()), clock, make_sequence(1, make_request(5)))
    clock.now = 12.5
    await run_once(watchdog)
    clock.now = 12.0
    watchdog.note_progress()
    clock.now = 14.0
    await run_once(watchdog)
    clock.now = 15.0
    with pytest.raises(EngineLost, match=r"for 3\.0 s \(stall_timeout_s\)"):
        await run_once(watchdog)


@pytest.mark.parametrize("has_iterations", [True, False])
async def test_a_beam_search_shows_nothing_but_iterations_before_its_end(has_iterations: bool) -> None:
    asked = make_request(5)
    beams = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, beam_width=2))
    clock, runtime = ManualClock(10.0), FakeRuntime(lambda request: SilentHandle())
    watchdog = watch(runtime, clock, make_sequence(1, beams), has_iterations=has_iterations)
    clock.now = 15.0
    with pytest.raises(EngineLost) if has_iterations else nullcontext():
        await run_once(watchdog)


async def test_nothing_stalls_where_nothing_is_due() -> None:
    clock = ManualClock(100.0)
    watchdog = watch(FakeRuntime(), clock)
    clock.now += 100.0
    await run_once(watchdog)


async def test_an_engine_that_says_it_is_ill() -> None:
    runtime = FakeRuntime()
    watchdog = watch(runtime, ManualClock(100.0))
    await run_once(watchdog)
    runtime.is_well = False
    with pytest.raises(EngineLost, match="the fake says that it is not healthy"):
        await run_once(watchdog)


class CancelledHandle(FakeHandle):
    """Ends without a token."""

    def read(self, response: object) -> ResponseDelta:
        return ResponseDelta([], FinishReason.CANCELLED)


@pytest.mark.parametrize(
    ("make_handle", "message"),
    [
        (SilentHandle, r"the fake loaded the model, but brings no token within 0\.05 s"),
        (CancelledHandle, "the fake loaded the model, but it brings no token"),
    ],
)
async def test_a_model_that_brings_no_token_does_not_warm_up(
    make_handle: Callable[[], FakeHandle], message: str
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await warm_up(FakeRuntime(), INFO, 0.05)
        with pytest.raises(SluiceError, match=message):
            await warm_up(FakeRuntime(lambda request: make_handle()), INFO, 0.05)
