"""The library's own front tells of workers that have ended."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil
import pytest

from engine.delegated.tensorrt_llm.loaded import worker_loss
from tests.waiting import until


@pytest.mark.slow  # the stand-in starts a rank
async def test_a_dead_worker_is_known_without_another_request(
    import_stand_in: Callable[..., ModuleType], open_llm: Callable[..., Any]
) -> None:
    llm = open_llm(import_stand_in(STAND_IN_RANK_DEATH="hang"), tensor_parallel_size=2)
    assert worker_loss(llm) is None
    [rank] = [each for each in psutil.Process().children() if each.cmdline()[-1:] == ["stand-in-rank=1"]]
    rank.kill()
    await until(lambda: worker_loss(llm) is not None)
    assert worker_loss(llm) == "The executor has failed: rank 1 is gone"


def test_a_front_that_tells_nothing_has_lost_nobody() -> None:
    assert worker_loss(object()) is None
