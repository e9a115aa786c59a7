"""The arithmetic of limits: integers only, without clock or I/O.

Redis counts the same levels (`redis_store.py`), and knows nothing of what they are levels of.

Limits per minute are token buckets: a whole limit may be used at once, and comes back evenly within a minute. What is
kept is the level of a bucket that leaks (what was used and has not come back) and its time, in milliseconds and
1/60000 of a request or token: then each millisecond lets exactly `limit` of these units out, nothing is rounded, and
an idle bucket is empty whatever its limit is, also after the limit has changed. A window that slides exactly would need
the time of each request, and one that is fixed lets twice the limit pass around its edge.

Limits per day and month count in UTC's calendar. A reservation counts for the day on which it was made.
"""

from collections.abc import Iterator
from datetime import date
from functools import lru_cache
from math import inf
from typing import NamedTuple

import msgspec

from sluice.gateway.tenancy.access.identity import QuotaLimits

MINUTE_MS = 60_000
DAY_MS = 86_400_000
MICROS = 1_000_000
"""Millionths of money in one unit: amounts are integers, too."""
_EPOCH = date(1970, 1, 1).toordinal()
MAX_LIMIT = 10**11
"""Limits beyond this one count as it, so that all arithmetic stays exact in the double numbers of Lua."""
_SHARED = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "queued_requests")
_LEFTS = {"tokens_per_day": "day_tokens", "tokens_per_month": "month_tokens", "money_per_month": "month_money"}
"""Limits of a calendar's periods, and the fields of accounts with what was used."""


class Party(msgspec.Struct, frozen=True):
    """A `key` or a `tenant` with its limits. `money_per_month` is in millionths; None is no limit."""

    scope: str
    name: str
    address: str
    """A name that no other party has."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    money_per_month: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    cached_token_rate: float = 1.0

    def share(self, used: "Account", num_parts: int) -> "Party":
        """Return the party with one of `num_parts` equal parts of what it may use, `used` being used already."""
        shares = {name: getattr(self, name) for name in _SHARED}
        parts = {name: max(1, most // num_parts) for name, most in shares.items() if most}
        for name, field in _LEFTS.items():
            most = getattr(self, name)
            if most is not None:
                parts[name] = max(0, most - getattr(used, field)) // num_parts
        return msgspec.structs.replace(self, **parts)


def make_party(scope: str, id_: str, name: str, limits: QuotaLimits) -> Party | None:
    """Return the party with these limits; None where there are none."""
    given = msgspec.structs.asdict(limits)
    rate = given.pop("cached_token_rate")
    money = given.pop("money_per_month")
    most = {field: min(value, MAX_LIMIT) for field, value in given.items() if value is not None}
    if money is not None:
        most["money_per_month"] = min(round(money * MICROS), MAX_LIMIT * MICROS // 1000)
    return Party(scope, name, f"{scope}:{id_}", **most, cached_token_rate=rate) if most else None


class Charge(msgspec.Struct, frozen=True):
    """Amounts that are asked for, or given back. Money is in millionths; `streams` is 1 for a request that begins."""

    requests: int = 0
    tokens: int = 0
    money: int = 0
    streams: int = 0


class Refusal(NamedTuple):
    """A limit that does not allow a request. `wait_ms` None: nobody knows when it will."""

    party: Party
    limit: str
    most: int
    asked: int
    left: int
    wait_ms: float | None
    """Until it is allowed where nobody else asks; infinite for a request that asks for more than the limit."""


class Level(msgspec.Struct, frozen=True):
    """How much of a limit is left, and after how long all of it is."""

    most: int
    left: int
    reset_ms: int


class Period(NamedTuple):
    """The day and the month of a moment in UTC, as numbers, and the milliseconds until the next ones."""

    day: int
    month: int
    day_left_ms: int
    month_left_ms: int


def period_of(now: int) -> Period:
    """Return the period of a time, in milliseconds since 1970."""
    day = now // DAY_MS
    month, ends = _month_of(day)
    return Period(day, month, DAY_MS - now % DAY_MS, ends - now)


@lru_cache(8)
def _month_of(day: int) -> tuple[int, int]:
    """Return the month of a day, and the millisecond in which it ends."""
    first = date.fromordinal(_EPOCH + day)
    month = first.year * 12 + first.month - 1
    following = date((month + 1) // 12, (month + 1) % 12 + 1, 1)
    return month, (following.toordinal() - _EPOCH) * DAY_MS


class Account:
    """The use that one party has made. A new one has used nothing; times are milliseconds since 1970.

    `advance` comes before everything else. Levels stay within the limits as long as every `add` follows a `fits`.
    """

    __slots__ = (
        "at",
        "day",
        "day_tokens",
        "month",
        "month_money",
        "month_tokens",
        "num_streams",
        "party",
        "request_level",
        "token_level",
    )

    def __init__(self, party: Party) -> None:
        self.party = party
        self.at = 0
        self.request_level = 0
        self.token_level = 0
        self.day = 0
        self.day_tokens = 0
        self.month = 0
        self.month_tokens = 0
        self.month_money = 0
        self.num_streams = 0

    def advance(self, now: int) -> None:
        """Let the time pass. A clock that was set back gives nothing back, and nothing is lost by it."""
        passed = now - self.at
        if passed == 0:
            return
        self.at = now
        if self.request_level and passed > 0:
            self.request_level = max(0, self.request_level - passed * (self.party.requests_per_minute or MAX_LIMIT))
        if self.token_level and passed > 0:
            self.token_level = max(0, self.token_level - passed * (self.party.tokens_per_minute or MAX_LIMIT))
        if now // DAY_MS != self.day:
            self._turn(period_of(now))

    def _turn(self, period: Period) -> None:
        self.day, self.day_tokens = period.day, 0
        if period.month != self.month:
            self.month, self.month_tokens, self.month_money = period.month, 0, 0

    def fits(self, charge: Charge) -> bool:
        """Whether every limit has room for the charge."""
        party, requests, tokens, money = self.party, charge.requests, charge.tokens, charge.money
        if requests:
            most = party.requests_per_minute
            if most is not None and self.request_level + requests * MINUTE_MS > most * MINUTE_MS:
                return False
        if charge.streams:
            most = party.concurrent_requests
            if most is not None and self.num_streams >= most:
                return False
        if tokens:
            most = party.tokens_per_minute
            if most is not None and self.token_level + tokens * MINUTE_MS > most * MINUTE_MS:
                return False
            most = party.tokens_per_day
            if most is not None and self.day_tokens + tokens > most:
                return False
            most = party.tokens_per_month
            if most is not None and self.month_tokens + tokens > most:
                return False
        if money:
            most = party.money_per_month
            return most is None or self.month_money + money <= most
        return True

    def add(self, charge: Charge) -> None:
        """Count a charge."""
        requests, tokens = charge.requests, charge.tokens
        if requests:
            if self.party.requests_per_minute is not None:
                self.request_level += requests * MINUTE_MS
            self.num_streams += charge.streams
        if tokens:
            if self.party.tokens_per_minute is not None:
                self.token_level += tokens * MINUTE_MS
            self.day_tokens += tokens
            self.month_tokens += tokens
            self.month_money += charge.money

    def settle(self, hold: "Hold", tokens: int, money: int) -> None:
        """Replace a hold by what was used.

        A bucket takes back no more than what it would not have let out since: else streams that are kept open for
        minutes would save up what nobody used, for one burst.
        """
        self.num_streams -= hold.streams
        unused, most = hold.tokens - tokens, self.party.tokens_per_minute
        if most is not None and unused:
            given_back = unused * MINUTE_MS
            if unused > 0:
                bound = (MINUTE_MS - self.at + hold.at) * most
                if given_back > bound:
                    given_back = bound if bound > 0 else 0
            level = self.token_level - given_back
            self.token_level = level if level > 0 else 0
        if self.day == hold.day:
            self.day_tokens -= unused
        if self.month == hold.month:
            self.month_tokens -= unused
            self.month_money -= hold.money - money

    @property
    def is_idle(self) -> bool:
        """Whether a new account would say the same."""
        levels = self.request_level or self.token_level or self.num_streams
        return not (levels or self.day_tokens or self.month_tokens or self.month_money)

    def level(self, limit: str, period: Period) -> Level:
        """Return how much is left of a limit that the party has."""
        most: int = getattr(self.party, limit)
        if limit == "requests_per_minute":
            return _bucket_level(most, self.request_level)
        if limit == "tokens_per_minute":
            return _bucket_level(most, self.token_level)
        if limit == "concurrent_requests":
            return Level(most, most - self.num_streams, 0)
        used: int = getattr(self, _LEFTS[limit])
        return Level(most, most - used, period.day_left_ms if limit == "tokens_per_day" else period.month_left_ms)

    def request_levels(self) -> list[Level]:
        """Return how much is left of the limit of requests, where there is one."""
        most = self.party.requests_per_minute
        return [] if most is None else [_bucket_level(most, self.request_level)]

    def token_levels(self) -> list[Level]:
        """Return how much is left of each limit of tokens."""
        party, levels = self.party, []
        if party.tokens_per_minute is not None:
            levels.append(_bucket_level(party.tokens_per_minute, self.token_level))
        if party.tokens_per_day is not None:
            levels.append(self.level("tokens_per_day", period_of(self.at)))
        if party.tokens_per_month is not None:
            levels.append(self.level("tokens_per_month", period_of(self.at)))
        return levels


Accounts = tuple[Account, ...]
"""The accounts of all parties of one request."""


class Hold:
    """The part of its parties' limits that a request holds since a moment, to be settled once."""

    __slots__ = ("at", "day", "earlier", "money", "month", "place", "streams", "tokens")

    def __init__(self, place: object, charge: Charge, account: Account, earlier: "Hold | None" = None) -> None:
        """`place` is where it is counted. `earlier` is what the same request holds besides."""
        self.place = place
        self.earlier = earlier
        self.tokens, self.money, self.streams = charge.tokens, charge.money, charge.streams
        self.at = account.at
        self.day = account.day
        self.month = account.month

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.money or self.streams)

    def extend(self, place: object, charge: Charge, account: Account) -> "Hold":
        """Return the hold with a later charge of the same request."""
        if self.place is not place or self.day != account.day:
            return Hold(place, charge, account, None if self.is_empty else self)
        if not self.tokens:
            self.at = account.at
        self.tokens += charge.tokens
        self.money += charge.money
        return self


def explain(accounts: "Accounts", charge: Charge, hold: "Hold | None" = None) -> Refusal | None:
    """Return what refuses the charge; None where nothing does. `hold` is what the same request holds already.

    Of several limits it is the one that takes longest. The wait is long enough for the whole request to be sent again,
    which also counts as one more.
    """
    refusals: list[Refusal] = []
    again_ms = 0.0
    for account in accounts:
        refusals.extend(_refusals(account, charge, hold))
        again_ms = max(again_ms, _bucket_wait(account.party.requests_per_minute, account.request_level, 1))
    if not refusals:
        return None
    worst = max(refusals, key=_severity)
    if worst.wait_ms is None or worst.wait_ms == inf:
        return worst
    return worst._replace(wait_ms=max(worst.wait_ms, again_ms))


def _refusals(account: Account, charge: Charge, hold: "Hold | None") -> Iterator[Refusal]:
    party, period = account.party, period_of(account.at)
    tokens, money = charge.tokens, charge.money
    while hold is not None:
        tokens, money, hold = tokens + hold.tokens, money + hold.money, hold.earlier
    for limit, asked, whole in (
        ("requests_per_minute", charge.requests, charge.requests),
        ("concurrent_requests", charge.streams, charge.streams),
        ("tokens_per_minute", charge.tokens, tokens),
        ("tokens_per_day", charge.tokens, tokens),
        ("tokens_per_month", charge.tokens, tokens),
        ("money_per_month", charge.money, money),
    ):
        most: int | None = getattr(party, limit)
        if not asked or most is None:
            continue
        level = account.level(limit, period)
        if asked > level.left:
            wait_ms = inf if whole > most else _wait(account, limit, most, asked, level)
            yield Refusal(party, limit, most, whole, max(0, level.left), wait_ms)


def _severity(refusal: Refusal) -> float:
    return 1e300 if refusal.wait_ms is None else refusal.wait_ms


def _wait(account: Account, limit: str, most: int, asked: int, level: Level) -> float | None:
    if limit == "concurrent_requests":
        return None
    if limit == "requests_per_minute":
        return _bucket_wait(most, account.request_level, asked)
    if limit == "tokens_per_minute":
        return _bucket_wait(most, account.token_level, asked)
    return level.reset_ms


def _bucket_wait(most: int | None, level: int, asked: int) -> float:
    if most is None:
        return 0
    return inf if asked > most else max(0, -(-(level + (asked - most) * MINUTE_MS) // most))


def _bucket_level(most: int, level: int) -> Level:
    return Level(most, (most * MINUTE_MS - level) // MINUTE_MS, -(-level // most) if most else 0)
