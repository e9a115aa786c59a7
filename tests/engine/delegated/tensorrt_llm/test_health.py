"""The library's own front tells of workers that have ended."""

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil

from engine.delegated.tensorrt_llm.llm import worker_loss


async def test_a_dead_worker_is_known_without_another_request(
    import_stand_in: Callable[..., ModuleType], open_llm: Callable[..., Any]
) -> None:
    llm = open_llm(import_stand_in(STAND_IN_RANK_DEATH="hang"), tensor_parallel_size=2)
    assert worker_loss(llm) is None
    [rank] = [each for each in psutil.Process().children() if each.cmdline()[-1:] == ["stand-in-rank=1"]]
    rank.kill()
    async with asyncio.timeout(20):
        while worker_loss(llm) is None:
            await asyncio.sleep(0.01)
    assert worker_loss(llm) == "The executor has failed: rank 1 is gone"


def test_a_front_that_tells_nothing_has_lost_nobody() -> None:
    assert worker_loss(object()) is None
