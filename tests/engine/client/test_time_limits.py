"""The client's own watch over deadlines: timers that fire, and those that must not."""

import asyncio

import pytest

from engine.client import base
from engine.client.base import RequestTimers
from engine.types import GenerateRequest, SamplingParams
from sluice.errors import ErrorCode, SluiceError


def request(**limits: float) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(), **limits)  # type: ignore[arg-type]


class Clerk:
    """Notes who expired, and answers whether they had started."""

    def __init__(self, *answers: bool | None) -> None:
        self._answers = list(answers)
        self.expired: asyncio.Queue[tuple[int, SluiceError]] = asyncio.Queue()
        self.settled = asyncio.Event()
        self.timers = RequestTimers(self.has_started, lambda *what: self.expired.put_nowait(what))

    def has_started(self, stream_id: int, deadline: float) -> bool | None:
        answer = self._answers.pop(0)
        if answer:
            self.settled.set()
        return answer


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "GRACE_S", 0.01)


async def test_a_request_that_takes_too_long_expires() -> None:
    clerk = Clerk()
    clerk.timers.watch(1, request(timeout_s=0.02))
    stream_id, error = await asyncio.wait_for(clerk.expired.get(), 5)
    assert (stream_id, error.code) == (1, ErrorCode.DEADLINE)
    assert "not complete within its 0.02 s" in error.message


async def test_one_that_waits_too_long_expires_once_that_is_known() -> None:
    clerk = Clerk(None, None, False)
    clerk.timers.watch(1, request(queue_timeout_s=0.02))
    _, error = await asyncio.wait_for(clerk.expired.get(), 5)
    assert "waited for longer than its 0.02 s" in error.message


async def test_those_that_started_or_ended_in_time_do_not() -> None:
    clerk = Clerk(True)
    clerk.timers.watch(1, request(queue_timeout_s=0.02))
    clerk.timers.watch(2, request(timeout_s=0.01, queue_timeout_s=0.01))
    clerk.timers.remove(2)
    clerk.timers.watch(3, request())
    clerk.timers.remove(3)
    await asyncio.wait_for(clerk.settled.wait(), 5)
    assert clerk.expired.empty()
