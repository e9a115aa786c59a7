from types import SimpleNamespace

import pytest

from sluice.cli.rag import ingest
from sluice.cli.rag.client import BrokenConnectionError, RejectedRequestError, UnreachableError
from sluice.cli.rag.ingest import RetryPolicy, retry_request


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the requested waits in seconds, without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(ingest, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


async def ask(*failures: Exception) -> str:
    """Return the result of a request that fails in these ways first."""
    left = list(failures)

    async def answer() -> str:
        if left:
            raise left.pop(0)
        return "yes"

    return await retry_request(answer, RetryPolicy(waits_s=(1, 2), longest_wait_s=30))


async def test_waits_as_long_as_the_server_says(waits: list[float]) -> None:
    assert await ask(RejectedRequestError("busy", 429, 7), RejectedRequestError("down", 503, 600)) == "yes"
    assert waits == [7, 30]


async def test_waits_longer_each_time(waits: list[float]) -> None:
    assert await ask(UnreachableError("gone"), RejectedRequestError("down", 503)) == "yes"
    assert waits == [1, 2]


@pytest.mark.parametrize(
    "failure", [RejectedRequestError("no", 400), RejectedRequestError("whose?", 403), BrokenConnectionError("reset")]
)
async def test_what_would_not_help(waits: list[float], failure: Exception) -> None:
    with pytest.raises(type(failure)):
        await ask(failure)
    assert waits == []


async def test_retries_end(waits: list[float]) -> None:
    with pytest.raises(UnreachableError, match="third"):
        await ask(UnreachableError("first"), UnreachableError("second"), UnreachableError("third"))
    assert waits == [1, 2]
