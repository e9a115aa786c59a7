"""Quotas in a real Redis: they count as those in memory do; several gateways, and outages."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.quotas.account import MINUTE_MS, Account, Charge, Hold, Party, Refusal, make_party
from sluice.gateway.tenancy.quotas.observer import rate_limit_headers
from sluice.gateway.tenancy.quotas.redis_store import LIFETIME_MS, RedisQuotas
from sluice.gateway.tenancy.quotas.store import MemoryQuotas, QuotaStore
from tests.clock import ManualClock
from tests.gateway.tenancy.quotas.test_account import BEGIN, START, limit, steps, tokens_limit
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

MORNING = START + 36_000_000
SAVED_UP = [("send", 600), ("pass", MINUTE_MS), ("send", 600), ("end", 0, 0.0), ("send", 600)]
"""A stream that is open for a minute gives its bucket nothing back."""
COUNTED = [field for field in Account.__slots__ if field not in ("party", "at")]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    server.kill()


def url_of(server: RedisServer) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


async def opened(server: RedisServer, clock: ManualClock[int] | None = None) -> RedisQuotas:
    quotas = RedisQuotas(url_of(server), clock)
    await until(lambda: quotas.is_up)
    return quotas


async def settled(quotas: RedisQuotas) -> None:
    """Wait until Redis has answered everything."""
    await until(lambda: not quotas._sent)


def both(**limits: Any) -> tuple[Party, Party]:
    """Return a key and its tenant with the same limits."""
    key, tenant = (make_party(scope, "1", "ci", QuotaLimits(**limits)) for scope in ("key", "tenant"))
    assert key is not None
    assert tenant is not None
    return key, tenant


def is_given(limit: int | None) -> bool:
    return limit is not None


async def take(quotas: QuotaStore, party: Party, tokens: int, hold: Hold | None = None) -> Hold | Refusal:
    return await quotas.reserve((quotas.open(party),), Charge(tokens=tokens), hold)


async def test_both_places_count_alike(server: RedisServer) -> None:
    """Whatever happens in whatever order, Redis and the memory of one gateway say the same."""
    client = Redis.from_url(url_of(server))
    clock = ManualClock(START)
    quotas = await opened(server, clock)
    loop = asyncio.get_running_loop()

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        st.builds(
            QuotaLimits,
            requests_per_minute=limit.filter(is_given),
            tokens_per_minute=tokens_limit.filter(is_given),  # else Redis is not asked about tokens
            tokens_per_day=tokens_limit,
            tokens_per_month=tokens_limit,
            money_per_month=st.floats(0, 0.001) | st.just(1e6),
            concurrent_requests=st.integers(0, 5) | st.just(99),
        ),
        st.lists(steps, max_size=25),
    )
    @example(QuotaLimits(requests_per_minute=5, tokens_per_minute=600), SAVED_UP)
    def compare(limits: QuotaLimits, sequence: list[Any]) -> None:
        asyncio.run_coroutine_threadsafe(follow(limits, sequence), loop).result(60)

    async def follow(limits: QuotaLimits, sequence: list[Any]) -> None:
        await client.flushdb()
        clock.now = START
        quotas._seen.clear()
        memory = MemoryQuotas(clock)
        parties = both(**msgspec.structs.asdict(limits))
        pairs = [(store, tuple(map(store.open, parties))) for store in (quotas, memory)]
        holds: list[tuple[Hold, Hold]] = []
        for name, *rest in sequence:
            if name == "pass":
                clock.now += rest[0]
                continue
            if name == "end":
                if holds:
                    pair = holds.pop(rest[0] % len(holds))
                    for (store, accounts), ended in zip(pairs, pair, strict=True):
                        used = int(ended.tokens * rest[1])
                        store.settle(accounts, ended, (used, used // 2), used)
                    await settled(quotas)
                continue
            begun = [await store.reserve(accounts, BEGIN, None) for store, accounts in pairs]
            answers = []
            for (store, accounts), held in zip(pairs, begun, strict=True):
                if isinstance(held, Hold):
                    answers.append(await store.reserve(accounts, Charge(tokens=rest[0], money=rest[0]), held))
            assert len({isinstance(each, Hold) for each in begun}) == 1
            refusals = [each for each in (*begun, *answers) if isinstance(each, Refusal)]
            assert refusals[::2] == refusals[1::2]
            for mine, theirs in zip(pairs[0][1], pairs[1][1], strict=True):
                assert [getattr(mine, each) for each in COUNTED] == [getattr(theirs, each) for each in COUNTED]
            first, second = begun
            if isinstance(first, Hold) and isinstance(second, Hold):
                holds.append((first, second))

    await asyncio.to_thread(compare)
    await quotas.close()
    await client.aclose()


async def test_gateways_share_what_is_left_and_give_back_what_a_dead_one_held(server: RedisServer) -> None:
    clock = ManualClock(MORNING)
    party = both(tokens_per_day=100, concurrent_requests=2)[0]
    mine, theirs = [await opened(server, clock) for _ in range(2)]
    held = await theirs.reserve((theirs.open(party),), BEGIN, None)
    assert isinstance(held, Hold)
    await take(theirs, party, 60, held)
    refused = await take(mine, party, 50)
    assert isinstance(refused, Refusal)
    assert (refused.limit, refused.left) == ("tokens_per_day", 40)
    theirs._beating.cancel()  # as if it had been killed
    for _ in range(3):
        clock.now += LIFETIME_MS // 2
        await mine._beat()
    mine_after = await take(mine, party, 100)
    assert isinstance(mine_after, Hold)
    assert mine.open(party).num_streams == 0
    mine.settle((mine.open(party),), mine_after, (10,), 0)
    # It was not dead after all: what it has used counts, once.
    theirs.settle((theirs.open(party),), held, (25,), 0)
    await settled(mine)
    await settled(theirs)
    assert isinstance(await take(mine, party, 65), Hold)
    assert isinstance(await take(mine, party, 1), Refusal)
    for each in (mine, theirs):
        await each.close()


async def test_an_outage_leaves_each_its_share_and_is_settled_afterwards(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(MORNING)
    party = both(tokens_per_day=100, tokens_per_month=1000)[0]
    mine, theirs = [await opened(server, clock) for _ in range(2)]
    await mine._beat()
    before = await take(mine, party, 20)
    assert isinstance(before, Hold)
    server.signal(signal.SIGSTOP)
    first = await take(mine, party, 30)
    assert isinstance(first, Hold)
    assert "share" in mine.problem
    mine.current((mine.open(both(tokens_per_day=7)[1]),))  # a share that nobody uses
    refused = await take(mine, party, 11)
    assert isinstance(refused, Refusal)
    assert (refused.most, refused.left) == (40, 10), "half of the 80 that were left"
    assert (b"x-ratelimit-limit-tokens", b"40") in rate_limit_headers(mine.current((mine.open(party),)))
    mine.settle((mine.open(party),), before, (5,), 0)
    late = await take(mine, party, 10)
    assert isinstance(late, Hold)
    mine.settle((mine.open(party),), first, (12,), 0)
    server.signal(signal.SIGCONT)
    await until(lambda: mine.is_up and not mine._sent)
    assert mine.problem == ""
    mine.settle((mine.open(party),), late, (1,), 0)
    for _ in range(3):
        clock.now += LIFETIME_MS // 2
        await mine._beat()  # which lets the command expire whose answer was lost
    await settled(mine)
    assert isinstance(await take(mine, party, 82), Hold), "5 + 12 + 1 are used"
    assert isinstance(await take(mine, party, 1), Refusal)
    assert [record.message for record in caplog.records if "answers again" in record.message]
    for each in (mine, theirs):
        await each.close()


async def test_a_redis_that_is_not_there_delays_nobody(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    quotas = RedisQuotas(url_of(server))
    party = both(tokens_per_day=100)[0]
    held = await take(quotas, party, 60)
    assert isinstance(held, Hold)
    assert isinstance(await take(quotas, party, 60), Refusal)
    await server.start()
    await until(lambda: quotas.is_up and not quotas._sent)
    assert isinstance(await take(quotas, party, 60), Refusal)
    quotas.settle((quotas.open(party),), held, (0,), 0)
    await settled(quotas)
    assert isinstance(await take(quotas, party, 100), Hold)
    await quotas.close()
    server.kill()


async def test_eight_gateways_use_the_limit_and_no_more(server: RedisServer) -> None:
    """Eight gateways at once ask for far more than the limit: together they use it to within a hundredth."""
    clock = ManualClock(MORNING)
    party = both(tokens_per_minute=20_000, tokens_per_day=30_000)[0]
    gateways = [await opened(server, clock) for _ in range(8)]
    used = 0

    async def send(quotas: RedisQuotas) -> None:
        nonlocal used
        held = await take(quotas, party, 100)
        if isinstance(held, Hold):
            used += 50
            quotas.settle((quotas.open(party),), held, (50,), 0)

    for _ in range(10):
        await asyncio.gather(*(send(each) for each in gateways for _ in range(10)))
    for each in gateways:
        await settled(each)
    assert 19_800 <= used <= 20_000
    clock.now += MINUTE_MS
    assert isinstance(await take(gateways[0], both(tokens_per_day=used)[0], 1), Refusal)
    for each in gateways:
        await each.close()
