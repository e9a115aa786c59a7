"""Levels and logs in a real Redis that several processes change at the same time: all keys or none, and fences."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.state.counter import Counted, LevelChange, RedisCounter
from sluice.state.outage import Outage
from sluice.state.redis import RedisClient, connect
from sluice.state.redis_log import Append, LogBatch, RedisLogs
from tests.clock import ManualClock
from tests.serving.caching.parts import RedisServer

MOST = 12
KEYS = "abc"
MS = 60_000
Act = tuple[str, int]
"""What a writer does, and its number."""
acts = st.tuples(st.sampled_from(("append", "append", "append", "take", "leave", "renew")), st.integers(0, 2))
following = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


class Take(NamedTuple):
    """What a holder takes of each key, and how much of it is used at the end."""

    holder: int
    amounts: dict[str, int]
    used: int


takes = st.builds(
    Take, st.integers(0, 2), st.dictionaries(st.sampled_from(KEYS), st.integers(1, 5), min_size=1), st.integers(0, 6)
)


@pytest.fixture
def clock() -> ManualClock[int]:
    return ManualClock(1_767_225_599_000)


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[list[RedisClient]]:
    server = RedisServer(tmp_path)
    await server.start()
    found = [connect(f"redis://127.0.0.1:{server.port}/0", 5.0) for _ in range(3)]
    yield found
    for each in found:
        await each.aclose()
    server.kill()


@pytest.fixture
async def counters(clients: list[RedisClient], clock: ManualClock[int]) -> AsyncIterator[list[RedisCounter]]:
    outage = Outage("away", "back")
    found = [RedisCounter(client, outage, "test:", timeout_s=5.0, clock=clock) for client in clients]
    await found[0].load()
    outage.end()
    yield found
    outage.close()
    for each in found:
        await each.close()


def parts_of(amounts: dict[str, int], held: dict[str, int] | None = None) -> list[LevelChange]:
    before = held or {}
    return [LevelChange(key, amounts.get(key, 0), before.get(key, 0), MOST, 0, 60_000) for key in before or amounts]


async def levels(counter: RedisCounter) -> dict[str, int]:
    counted = await counter.take("", [LevelChange(key, 0, 0, -1, 0, 60_000) for key in KEYS])
    assert counted is not None
    return dict(zip(KEYS, counted.levels, strict=True))


def sums(amounts: Iterator[dict[str, int]]) -> dict[str, int]:
    total = dict.fromkeys(KEYS, 0)
    for each in amounts:
        for key, amount in each.items():
            total[key] += amount
    return total


async def test_all_keys_or_none_whoever_takes_at_the_same_time(
    clients: list[RedisClient], counters: list[RedisCounter], clock: ManualClock[int]
) -> None:
    """What was taken is what counts, of every key; what was used replaces it, and a holder that leaves gives back."""
    loop = asyncio.get_running_loop()

    @following
    @given(st.lists(takes, max_size=20), st.integers(0, 20))
    def check(wanted: list[Take], num_settled: int) -> None:
        asyncio.run_coroutine_threadsafe(follow(wanted, num_settled), loop).result(60)

    async def follow(wanted: list[Take], num_settled: int) -> None:
        await clients[0].flushdb()
        answers: list[Counted | None] = await asyncio.gather(
            *(counters[each.holder].take(str(each.holder), parts_of(each.amounts)) for each in wanted)
        )
        taken = [each for each, answer in zip(wanted, answers, strict=True) if answer is not None and answer[1]]
        found = await levels(counters[0])
        assert found == sums(each.amounts for each in taken)
        assert max(found.values()) <= MOST
        for each, answer in zip(wanted, answers, strict=True):
            assert answer is not None
            if not answer.has_happened:
                assert any(answer.levels[i] + amount > MOST for i, amount in enumerate(each.amounts.values()))
        settled, held = taken[:num_settled], taken[num_settled:]
        used = [dict.fromkeys(each.amounts, each.used) for each in settled]
        await asyncio.gather(
            *(
                counters[each.holder].settle(str(each.holder), clock.now, parts_of(amounts, each.amounts))
                for each, amounts in zip(settled, used, strict=True)
            )
        )
        assert await levels(counters[1]) == sums(iter([*used, *(each.amounts for each in held)]))
        await asyncio.gather(*(counters[1].leave(name) for name in "01"))
        assert await levels(counters[2]) == sums(iter([*used, *(each.amounts for each in held if each.holder == 2)]))

    await asyncio.to_thread(check)


async def do(logs: RedisLogs, log_id: str, act: str, item: bytes) -> bool:
    """Return whether it has happened."""
    if act == "append":
        return await logs.append([LogBatch(log_id, MS, "", item)]) == [Append.DONE]
    if act == "take":
        return await logs.take(log_id, MS) is not None
    await (logs.leave() if act == "leave" else logs.renew(MS))
    return True


async def test_whoever_has_lost_a_log_appends_no_more(clients: list[RedisClient]) -> None:
    """What was appended is there once, and nothing else; only its writer appends, which lives until it leaves."""
    loop, names = asyncio.get_running_loop(), itertools.count()
    await RedisLogs(clients[0], "test:", "any").load()

    @following
    @given(st.lists(st.lists(acts, min_size=1, max_size=5), max_size=12))
    def check(rounds: list[list[Act]]) -> None:
        asyncio.run_coroutine_threadsafe(follow(f"log{next(names)}", rounds), loop).result(60)

    async def follow(log_id: str, rounds: list[list[Act]]) -> None:
        writers = [RedisLogs(each, "test:", f"{log_id}-{number}") for number, each in enumerate(clients)]
        assert await writers[0].begin(log_id, b"origin", MS) == ""
        await writers[0].renew(MS)
        owner, living, items = 0, {0}, list[bytes]()
        for at, together in enumerate(rounds):
            named = [(act, number, b"%d:%d:%d" % (number, at, i)) for i, (act, number) in enumerate(together)]
            happened = await asyncio.gather(*(do(writers[number], log_id, act, item) for act, number, item in named))
            done = [each for each, has_happened in zip(named, happened, strict=True) if has_happened]
            taken = {number for act, number, _ in done if act == "take"}
            left = {number for act, number, _ in done if act == "leave"}
            assert owner not in living - left or taken <= {owner}, "it was taken from one that lives"
            [found] = await writers[0].read([(log_id, 0)])
            assert found[: len(items)] == items
            assert sorted(found[len(items) :]) == sorted(item for act, _, item in done if act == "append")
            who = [int(item.partition(b":")[0]) for item in found[len(items) :]]
            assert set(who) <= taken | {owner}
            living = (living | {number for act, number, _ in done if act == "renew"}) - left
            [state] = await writers[0].look([log_id], 1)
            assert state is not None
            owner, items = int(state.writer.rpartition("-")[2]), found

    await asyncio.to_thread(check)


async def test_a_key_stands_for_the_first_log_that_begins_with_it(clients: list[RedisClient]) -> None:
    logs = [RedisLogs(each, "test:", name) for each, name in zip(clients, "abc", strict=True)]
    await logs[0].load()
    found = await asyncio.gather(*(each.begin(f"log{n}", b"", MS, "key") for n, each in enumerate(logs)))
    first = found.index("")
    assert found == ["" if n == first else f"log{first}" for n in range(3)]
    await logs[first].append([LogBatch(f"log{first}", MS, "broken", b"")])
    assert await logs[2].begin("another", b"", MS, "key") == ""
    await logs[0].cancel("another")
    assert [each.name for each in await logs[2].append([LogBatch("another", MS, "", b"x")])] == ["CANCELLED"]
    assert await logs[2].append([LogBatch("nowhere", MS, "", b"x")]) == [Append.LOST]
