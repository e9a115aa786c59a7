"""The arithmetic of limits, under any interleaving of requests, ends and time."""

import asyncio
import copy
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.quotas.account import (
    DAY_MS,
    MINUTE_MS,
    Account,
    Charge,
    Hold,
    Party,
    Refusal,
    make_party,
    period_of,
)
from sluice.gateway.tenancy.quotas.store import MemoryQuotas
from tests.clock import ManualClock

START = 1_767_225_599_000
"""A second before a new year."""
BEGIN = Charge(requests=1, streams=1)


def party(**limits: Any) -> Party:
    made = make_party("key", "1", "ci", QuotaLimits(**limits))
    assert made is not None
    return made


class History:
    """Sends requests to a store, and keeps what each was charged with and when."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.clock = ManualClock(START)
        self.store = MemoryQuotas(self.clock)
        made = make_party("key", "1", "ci", limits)
        self.account = self.store.open(made or Party("key", "ci", "key:1"))
        self.limits = limits
        self.requests: list[int] = []
        self.charges: list[tuple[int, int]] = []
        self.open: list[tuple[int, Hold]] = []

    def send(self, tokens: int) -> None:
        before = copy.copy(self.account)
        held = self._reserve(BEGIN, None)
        if held is None:
            return
        self.requests.append(self.clock.now)
        with_tokens = self._reserve(Charge(tokens=tokens), held)
        if with_tokens is None:
            self.store.settle((self.account,), held, (0,), 0)
            before.advance(self.clock.now)
            assert self.account.num_streams == before.num_streams
            return
        self.charges.append((self.clock.now, tokens))
        self.open.append((len(self.charges) - 1, with_tokens))

    def _reserve(self, charge: Charge, hold: Hold | None) -> Hold | None:
        held = asyncio.run(self.store.reserve((self.account,), charge, hold))
        if isinstance(held, Hold):
            return held
        self._check_wait(held, charge)
        return None

    def _check_wait(self, refusal: Refusal, charge: Charge) -> None:
        """After its wait the charge fits where nobody else came, and a request with it."""
        if refusal.wait_ms is None or refusal.wait_ms == inf:
            return
        later = copy.copy(self.account)
        later.advance(self.clock.now + int(refusal.wait_ms))
        assert later.fits(charge)
        later.num_streams = 0
        assert later.fits(BEGIN)

    def end(self, which: int, part: float) -> None:
        if not self.open:
            return
        at, hold = self.open.pop(which % len(self.open))
        used = int(hold.tokens * part)
        self.store.settle((self.account,), hold, (used,), 0)
        self.charges[at] = self.charges[at][0], used

    def check(self) -> None:
        """Nothing is ever overdrawn, and what is open and was used is what is counted."""
        self.account.advance(self.clock.now)
        limits, account = self.limits, self.account
        for most, level in (
            (limits.requests_per_minute, account.request_level),
            (limits.tokens_per_minute, account.token_level),
        ):
            assert 0 <= level <= (most or 0) * MINUTE_MS
        if limits.requests_per_minute is not None:
            check_windows([(at, 1) for at in self.requests], limits.requests_per_minute)
        if limits.tokens_per_minute is not None:
            passed = self.clock.now - START
            used = sum(tokens for _, tokens in self.charges)
            assert used * MINUTE_MS <= limits.tokens_per_minute * (MINUTE_MS + passed)
        today = sum(tokens for at, tokens in self.charges if at // DAY_MS == account.day)
        assert account.day_tokens == today <= (limits.tokens_per_day or inf)
        month = sum(tokens for at, tokens in self.charges if period_of(at).month == account.month)
        assert account.month_tokens == month <= (limits.tokens_per_month or inf)
        assert account.num_streams == len(self.open) <= (limits.concurrent_requests or inf)


def check_windows(charges: list[tuple[int, int]], most: int) -> None:
    """From any charge to any later one, no more than the limit and what came back meanwhile."""
    for first in range(len(charges)):
        used = 0
        for at, amount in charges[first:]:
            used += amount
            assert used * MINUTE_MS <= most * (MINUTE_MS + at - charges[first][0])


limit = st.none() | st.integers(1, 5)
tokens_limit = st.none() | st.integers(1, 1000)
steps = st.one_of(
    st.tuples(st.just("send"), st.integers(1, 600)),
    st.tuples(st.just("end"), st.integers(0, 9), st.floats(0, 1)),
    st.tuples(st.just("pass"), st.one_of(st.integers(0, 3_000), st.integers(0, 90_000), st.just(DAY_MS))),
)


@given(
    st.builds(
        QuotaLimits,
        requests_per_minute=limit,
        tokens_per_minute=tokens_limit,
        tokens_per_day=tokens_limit,
        tokens_per_month=tokens_limit,
        concurrent_requests=limit,
    ),
    st.lists(steps, max_size=40),
)
def test_no_interleaving_overdraws_or_loses_anything(limits: QuotaLimits, sequence: list[Any]) -> None:
    history = History(limits)
    for name, *rest in sequence:
        if name == "send":
            history.send(*rest)
        elif name == "end":
            history.end(*rest)
        else:
            history.clock.now += rest[0]
        history.check()


@pytest.mark.parametrize("most", [1, 7, 60, 999, 10**9 + 7])
def test_a_bucket_refills_exactly(most: int) -> None:
    """However often one looks, a full limit is back after a minute and no millisecond earlier."""
    account = Account(party(tokens_per_minute=most))
    account.advance(START)
    account.add(Charge(tokens=most))
    for at in range(START, START + MINUTE_MS, 137):
        account.advance(at)
        assert account.token_level == most * (MINUTE_MS - (at - START))
    account.advance(START + MINUTE_MS - 1)
    assert not account.fits(Charge(tokens=most))
    account.advance(START + MINUTE_MS)
    assert account.fits(Charge(tokens=most))


def test_the_wait_is_exact() -> None:
    account = Account(party(requests_per_minute=7))
    account.advance(START)
    account.add(Charge(requests=7))
    assert not account.fits(BEGIN)
    history = History(QuotaLimits(requests_per_minute=7))
    for _ in range(7):
        history.send(1)
    refused = asyncio.run(history.store.reserve((history.account,), BEGIN, None))
    assert isinstance(refused, Refusal)
    assert refused.wait_ms == 8572  # 60 s / 7, rounded up
    for wait_ms, fits in ((8571, False), (8572, True)):
        history.account.advance(START + wait_ms)
        assert history.account.fits(BEGIN) is fits


def test_streams_that_stay_open_save_nothing_up() -> None:
    """What a stream has reserved and not used is given back as far as the bucket has not refilled since."""
    history = History(QuotaLimits(tokens_per_minute=1000))
    for _ in range(10):
        history.send(1000)
        history.clock.now += MINUTE_MS
    assert len(history.open) == 10
    history.send(1000)
    for _ in range(10):
        history.end(0, 0.0)
    history.send(1)
    assert len(history.open) == 1, "a whole limit is in use at this moment"
    history.end(0, 0.1)
    history.send(900)
    assert len(history.open) == 1


@pytest.mark.parametrize("age_ms", [0, MINUTE_MS // 2, 5 * MINUTE_MS])
def test_what_was_used_beyond_the_reservation_counts(age_ms: int) -> None:
    """A remote model may count more tokens than were estimated."""
    history = History(QuotaLimits(tokens_per_minute=100))
    history.send(60)
    history.clock.now += age_ms
    history.end(0, 1.5)
    assert history.account.token_level == max(0, 60 * MINUTE_MS - age_ms * 100) + 30 * MINUTE_MS


def test_a_clock_that_is_set_back_blocks_nobody() -> None:
    history = History(QuotaLimits(requests_per_minute=1))
    history.send(1)
    history.clock.now -= 3_600_000
    history.send(1)
    history.clock.now += MINUTE_MS
    history.send(1)
    assert len(history.requests) == 2


def test_a_limit_that_is_lowered_counts_at_once() -> None:
    history = History(QuotaLimits(tokens_per_day=1000))
    history.send(800)
    history.account = history.store.open(party(tokens_per_day=500))
    history.send(1)
    history.account = history.store.open(party(tokens_per_day=900))
    history.send(100)
    assert [tokens for _, tokens in history.charges] == [800, 100]


def test_idle_accounts_are_forgotten_and_used_ones_are_not() -> None:
    clock = ManualClock(START)
    store = MemoryQuotas(clock)
    used = store.open(Party("key", "a", "key:a", tokens_per_day=5))
    asyncio.run(store.reserve((used,), Charge(tokens=5), None))
    before = store.generation
    for number in range(30_000):
        store.open(Party("key", "", f"key:{number}", tokens_per_day=5))
    assert store.generation > before
    assert len(list(store.accounts())) < 25_000
    assert store.open(used.party) is used
