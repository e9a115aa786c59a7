from types import SimpleNamespace

import pytest

from cli.rag import retries
from cli.rag.failures import Broken, Refused, Unreachable
from cli.rag.retries import RetryPolicy, patiently


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited there, in seconds; nothing really is."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(retries, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


async def ask(*failures: Exception) -> str:
    """The answer after those failures."""
    left = list(failures)

    async def answer() -> str:
        if left:
            raise left.pop(0)
        return "yes"

    return await patiently(answer, RetryPolicy(waits_s=(1, 2), longest_wait_s=30))


async def test_waits_as_long_as_the_server_says(waits: list[float]) -> None:
    assert await ask(Refused("busy", 429, 7), Refused("down", 503, 600)) == "yes"
    assert waits == [7, 30]


async def test_waits_longer_each_time(waits: list[float]) -> None:
    assert await ask(Unreachable("gone"), Refused("down", 503)) == "yes"
    assert waits == [1, 2]


@pytest.mark.parametrize("failure", [Refused("no", 400), Refused("whose?", 403), Broken("reset")])
async def test_what_would_not_help(waits: list[float], failure: Exception) -> None:
    with pytest.raises(type(failure)):
        await ask(failure)
    assert waits == []


async def test_patience_ends(waits: list[float]) -> None:
    with pytest.raises(Unreachable, match="third"):
        await ask(Unreachable("first"), Unreachable("second"), Unreachable("third"))
    assert waits == [1, 2]
