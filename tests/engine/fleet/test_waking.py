"""Requests that wait for the first engine of a fleet: how many, for how long, and what they are told."""

import asyncio
import json
from pathlib import Path

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.fleet.waking import WakeSettings, WakingRoom, presume_info
from sluice.errors import ErrorCode, SluiceError
from tests.clock import ManualClock


def make_room(timeout_s: float = 60.0, max_requests: int = 2) -> tuple[WakingRoom, ManualClock[float]]:
    clock = ManualClock(100.0)
    return WakingRoom(WakeSettings(timeout_s, max_requests), clock), clock


async def hold(room: WakingRoom) -> "asyncio.Task[None]":
    held = asyncio.create_task(room.wait())
    await asyncio.sleep(0)
    return held


async def test_requests_wait_for_the_engine_and_no_more_than_may() -> None:
    room, clock = make_room()
    held = [await hold(room), await hold(room)]
    assert (room.num_held, room.waking_s) == (2, 0.0)
    clock.now += 10.0
    with pytest.raises(
        SluiceError,
        match=r"2 requests wait for an engine to start, and the limit is 2 \(--wake-max-requests\); try again in 20 s",
    ) as full:
        await room.wait()
    assert (full.value.code, full.value.retry_after_s) == (ErrorCode.OVERLOADED, 20.0)
    clock.now += 30.0
    with pytest.raises(SluiceError) as later:
        room.refuse_if_full()
    assert later.value.retry_after_s == 40.0, "as long again as it has taken"
    room.wake()
    await asyncio.gather(*held)
    assert (room.num_held, room.waking_s) == (0, 0.0)
    await hold(room)
    clock.now += 15.0
    assert room.expected_s() == 25.0, "the last one took 40 s"
    room.close(SluiceError(ErrorCode.UNAVAILABLE, "the end"))


async def test_one_that_has_waited_long_enough_hears_when_to_try_again() -> None:
    room, clock = make_room(timeout_s=0.001)
    with pytest.raises(
        SluiceError,
        match=r"no engine of this model has started within 0\.001 s \(--wake-timeout-secs\); try again in 30 s",
    ) as late:
        await room.wait()
    assert (late.value.code, late.value.retry_after_s) == (ErrorCode.UNAVAILABLE, 30.0)
    assert room.num_held == 0
    clock.now += 500.0
    held = await hold(room)
    assert room.waking_s == 0.0, "another wake, long after the one that nobody waits for"
    held.cancel()
    await asyncio.wait((held,))
    assert room.num_held == 0


async def test_the_end_of_the_fleet_ends_who_waits() -> None:
    room, _ = make_room()
    held = await hold(room)
    room.close(SluiceError(ErrorCode.UNAVAILABLE, "the engine was stopped"))
    with pytest.raises(SluiceError, match="the engine was stopped"):
        await held


def test_a_checkpoint_says_what_is_known_of_an_engine(tmp_path: Path) -> None:
    fields = {
        "model_type": "m",
        "text_config": {"vocab_size": 9, "max_position_embeddings": 77, "eos_token_id": [3, 4]},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    info = presume_info(EngineConfig(model_path=str(tmp_path)))
    assert (info.model_type, info.vocab_size, info.max_model_len, info.eos_token_ids) == ("m", 9, 77, (3, 4))
    assert presume_info(EngineConfig(model_path=str(tmp_path), max_model_len=55)).max_model_len == 55
    with pytest.raises(SluiceError, match="does not exist"):
        presume_info(EngineConfig(model_path=str(tmp_path / "none")))
