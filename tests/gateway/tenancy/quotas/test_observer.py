"""What calls hold and settle, without a server."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import Call, CallLog
from sluice.gateway.options.quotas import QuotaOptions, limits, quota_store
from sluice.gateway.tenancy.access.identity import Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.quotas.account import DAY_MS
from sluice.gateway.tenancy.quotas.observer import QuotaObserver, format_duration
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from tests.clock import ManualClock
from tests.gateway.tenancy.quotas.test_account import START


def price(model: str, adapter: str, prompt: int, cached: int, generated: int) -> int:
    return (prompt - cached) * 2 + generated * 10 if model == "dear" else 0


@dataclass
class Gateway:
    """Observes calls of keys with some limits."""

    tenants: dict[str, QuotaLimits] = field(default_factory=dict)
    clock: ManualClock[int] = field(default_factory=lambda: ManualClock(START))

    def __post_init__(self) -> None:
        self.store = MemoryQuotas(self.clock)
        self.observer = QuotaObserver(self.store, lambda: self.tenants, price=price)

    async def begin(self, identity: Identity | None, tenant: str = "", model: str = "dear") -> Call:
        call = Call((self.observer,), "openai", "/v1/completions", "id")
        call.identity, call.tenant, call.group, call.model = identity, tenant, RouteGroup.INFERENCE, model
        await call.begin()
        return call

    async def run(self, identity: Identity, prompt: int, most: int, generated: int, **fields: Any) -> Call:
        """Run a call to its end."""
        call = await self.begin(identity, identity.tenant, **fields)
        try:
            await call.admit(prompt, most)
            call.prompt_tokens, call.generated_tokens = prompt, generated
        finally:
            call.release()
        return call

    def used(self) -> dict[str, tuple[int, int]]:
        return {each.party.address: (each.month_tokens, each.month_money) for each in self.store.accounts()}


def key(**fields: Any) -> Identity:
    return Identity(name="ci", key_id="1", limits=QuotaLimits(**fields))


async def test_money_counts_by_the_price_table() -> None:
    gateway, sender = Gateway(), key(money_per_month=0.001)
    await gateway.run(sender, 100, 80, 10)
    assert gateway.used() == {"key:1": (110, 300)}
    with pytest.raises(SluiceError, match=r"0.00 a month; 0.00 asked.*0.00 left") as refused:
        await gateway.run(sender, 100, 60, 10)
    assert refused.value.retry_after_s == 1.0, "the new year begins a second later"
    await gateway.run(sender, 100, 60, 10, model="cheap")
    gateway.clock.now += 1000
    await gateway.run(sender, 100, 60, 10)
    with pytest.raises(SluiceError, match="more than the whole limit") as never:
        await gateway.run(sender, 1000, 60, 10)
    assert never.value.retry_after_s is None
    assert never.value.code is ErrorCode.OVERLOADED


async def test_cached_tokens_count_at_the_rate_of_each_party() -> None:
    gateway = Gateway({"team": QuotaLimits(tokens_per_month=1000, cached_token_rate=0.5)})
    sender = Identity(
        name="ci", key_id="1", tenant="team", limits=QuotaLimits(tokens_per_day=1000, cached_token_rate=0.1)
    )
    call = await gateway.begin(sender, "team", "cheap")
    await call.admit(101, 50)
    call.prompt_tokens, call.cached_tokens, call.generated_tokens = 101, 91, 5
    call.release()
    assert gateway.used() == {"key:1": (10 + 10 + 5, 0), "tenant:team": (10 + 46 + 5, 0)}


async def test_a_call_around_midnight_is_settled_in_both_days() -> None:
    gateway, sender = Gateway(), key(tokens_per_day=1000)
    call = await gateway.begin(sender)
    await call.admit(10, 90)
    gateway.clock.now += DAY_MS
    await call.admit(10, 90)
    account = gateway.store.open(next(gateway.store.accounts()).party)
    assert account.day_tokens == 100
    call.prompt_tokens, call.generated_tokens = 20, 30
    call.release()
    assert (account.day_tokens, account.num_streams) == (50, 0)


async def test_calls_of_nobody_and_other_routes_are_free() -> None:
    gateway, sender = Gateway({"team": QuotaLimits(requests_per_minute=1)}), key(requests_per_minute=1)
    for _ in range(3):
        assert (await gateway.begin(None)).answer_headers() == []
    other = Call((gateway.observer,), "openai", "/v1/models", "id")
    other.identity, other.group = sender, None
    await other.begin()
    assert other.answer_headers() == []
    (await gateway.begin(None, "team")).release()
    with pytest.raises(SluiceError, match="tenant 'team' is limited to 1 requests per minute"):
        await gateway.begin(None, "team")


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.booleans()), max_size=30))
def test_what_was_used_is_what_counts_whatever_ends_how(calls: list[tuple[int, int, int, bool]]) -> None:
    """The sum of what calls used is what is counted when all have ended, refused ones included."""

    async def run() -> None:
        gateway = Gateway(clock=ManualClock(START + DAY_MS))
        sender = key(tokens_per_month=20_000, concurrent_requests=5, queued_requests=3)
        used, open_calls = 0, []
        for prompt, most, generated, ends in calls:
            gateway.clock.now += 50
            try:
                call = await gateway.begin(sender)
            except SluiceError:
                continue
            try:
                await call.admit(prompt, most)
            except SluiceError:
                call.release()
                continue
            call.prompt_tokens, call.generated_tokens, call.first_token = prompt, min(most, generated), 1.0
            used += prompt + min(most, generated)
            if ends:
                call.release()
            else:
                open_calls.append(call)
        for call in open_calls:
            call.release()
        assert sum(tokens for tokens, _ in gateway.used().values()) == used
        assert all(each.num_streams == 0 for each in gateway.store.accounts())
        assert not any(gateway.observer._waiting.values())

    asyncio.run(run())


def test_a_server_without_keys_opens_no_call_for_quotas() -> None:
    calls = CallLog()
    calls.observe(QuotaObserver(MemoryQuotas()), only_known=True)
    assert not calls.is_active


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (999, "999ms"), (1000, "1s"), (1001, "2s"), (60_000, "1m0s"), (3_661_000, "1h1m1s")],
)
def test_durations_are_openai_s(ms: int, text: str) -> None:
    assert format_duration(ms) == text


def test_options() -> None:
    assert QuotaOptions().store == quota_store("memory")
    assert quota_store("redis://h:1/0") == "redis://h:1/0"
    found = limits("requests_per_minute=60, money_per_month=2.5,cached_token_rate=0.25")
    assert found == QuotaLimits(requests_per_minute=60, money_per_month=2.5, cached_token_rate=0.25)
    for wrong in ("", "requests=1", "tokens_per_day=x", "tokens_per_day=-1", "tokens_per_day=1,tokens_per_day=2"):
        with pytest.raises(ValueError, match="limits"):
            limits(wrong)
    for wrong in ("none", "redis://", "http://h", "quotas.sqlite"):
        with pytest.raises(ValueError, match="memory or redis"):
            quota_store(wrong)
