"""Quotas in a Redis that gateways share. Where it is away, each goes on with its share, and settles afterwards."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from secrets import token_hex
from typing import NamedTuple

from sluice.gateway.tenancy.quotas.account import (
    DAY_MS,
    MAX_LIMIT,
    MINUTE_MS,
    Account,
    Accounts,
    Charge,
    Hold,
    Party,
    Refusal,
    explain,
    period_of,
)
from sluice.gateway.tenancy.quotas.store import MemoryQuotas, SeenAccounts, wall_ms
from sluice.state.counter import Counted, LevelChange, RedisCounter
from sluice.state.outage import Outage, keep_trying
from sluice.state.redis import FAILURES, connect

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
"""How long a request waits for Redis before it is decided here."""
_BEAT_S = 1.0
_RETRY_S = 0.5
LIFETIME_MS = 10_000
"""How long a gateway may be silent until the others give back what it holds."""
_MAX_UNSENT = 100_000
_PREFIX = "sluice:quotas:"
_MONTH_TTL_MS = 40 * DAY_MS
_AWAY = "the quota store is away: this gateway allows its share of each limit"
_Change = Callable[[], "asyncio.Future[Counted | None]"]
"""Sends a change to Redis."""


class _Amounts(NamedTuple):
    """The amounts that a change adds to a party's levels, by the names that accounts have for these."""

    request_level: int = 0
    num_streams: int = 0
    token_level: int = 0
    day_tokens: int = 0
    month_tokens: int = 0
    month_money: int = 0


_NOTHING = _Amounts()


class RedisQuotas(SeenAccounts):
    """Counts use in Redis: one round trip for each reservation, and nobody waits for a settlement.

    A command that fails or takes too long means that Redis is away. From then on a gateway has, until Redis answers
    again, an equal part of what each party may use, by the number of gateways last seen. Then it adds what was used.
    It returns under another name: what it held under the old one, also by commands whose answer was lost, expires.
    To be made on the event loop.
    """

    def __init__(self, url: str, clock: Callable[[], int] | None = None) -> None:
        """Connects by itself, again after an outage. `clock` None: Redis' own. Raises ValueError for a wrong URL."""
        super().__init__(clock or wall_ms)
        # At its start a server is too busy to hear the first answer in time.
        self._outage = Outage(_AWAY, "the quota store answers again", num_quiet=1)
        self._client = connect(url, _TIMEOUT_S)
        self._counter = RedisCounter(self._client, self._outage, _PREFIX, timeout_s=_TIMEOUT_S, clock=clock)
        self._name = token_hex(6)
        self._num_gateways = 1
        self._own_clock = clock
        self._local = MemoryQuotas(clock)
        """Counts while Redis is away."""
        self._shares: dict[str, tuple[Party, Account]] = {}
        """Parties with their accounts in `_local`, by address."""
        self._unsent: deque[_Change] = deque(maxlen=_MAX_UNSENT)
        """Changes of what was used, to be sent when Redis is back."""
        self._sent: set[asyncio.Future[Counted | None]] = set()
        beating = keep_trying(self._outage, self._beat, FAILURES, retry_s=_RETRY_S, beat_s=_BEAT_S)
        self._beating = asyncio.create_task(beating, name="quotas")

    @property
    def is_up(self) -> bool:
        return self._outage.is_up

    @property
    def problem(self) -> str:
        return "" if self.is_up else _AWAY

    def accounts(self) -> Iterator[Account]:
        now = self._clock()
        for account in list(self._seen.values()):
            account.advance(max(now, account.at))
            yield account

    def current(self, accounts: Accounts) -> Accounts:
        return accounts if self.is_up else self._find_shares(accounts)

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        name, amounts, period = self._name, _amounts_of(charge), period_of(self._counter.now())
        parts = [part for each in accounts for part in _parts(each.party, period.day, period.month, amounts)]
        if not any(each.amount and each.most >= 0 for each in parts):  # what is not limited costs no round trip
            return Hold(name, Charge(), accounts[0]) if hold is None else hold
        counted = await self._counter.take(name, parts)
        if counted is None:
            return await self._local.reserve(self._find_shares(accounts), charge, hold)
        levels = iter(counted.levels)
        for account in accounts:
            account.at, account.day, account.month = counted.now, period.day, period.month
            for field in _Amounts._fields:
                setattr(account, field, next(levels))
        if counted.has_happened:
            return Hold(name, charge, account) if hold is None else hold.extend(name, charge, account)
        # There is no refusal only where limits have changed meanwhile.
        return explain(accounts, charge, hold) or await self.reserve(accounts, charge, hold)

    def settle(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        if hold.is_empty:
            return
        if hold.place is self._local:
            self._local.settle(self._find_shares(accounts), hold, tokens, money)
        elif isinstance(hold.place, MemoryQuotas):
            self._settle_late(accounts, hold, tokens, money)
        else:
            held, parts = _amounts_of(Charge(0, hold.tokens, hold.money, hold.streams)), list[LevelChange]()
            for each, used in zip(accounts, tokens, strict=True):
                each.settle(hold, used, money)  # for the metrics, until Redis says how it is
                parts += _parts(each.party, hold.day, hold.month, _amounts_of(Charge(0, used, money)), held)
            changed = [each for each in parts if each.amount or each.held]
            self._send(partial(self._counter.settle, str(hold.place), hold.at, changed))

    def _settle_late(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        """Settle what was held here in an outage that is over: all of it was added to what Redis has."""
        for each, used in zip(accounts, tokens, strict=True):
            more = used - hold.tokens
            late = _Amounts(day_tokens=more, month_tokens=more, month_money=money - hold.money)
            self._add(each.party, hold.day, hold.month, late)

    def _add(self, party: Party, day: int, month: int, amounts: _Amounts) -> None:
        parts = [each for each in _parts(party, day, month, amounts) if each.amount]
        if parts:
            self._send(partial(self._counter.add, parts))

    def _send(self, change: _Change) -> None:
        """Send a change, again after an outage where it has no answer."""

        def keep(answer: "asyncio.Future[Counted | None]") -> None:
            self._sent.discard(answer)
            if not answer.cancelled() and answer.result() is None:
                self._unsent.append(change)

        sent = change()
        self._sent.add(sent)
        sent.add_done_callback(keep)

    # --- outages ---

    def _find_shares(self, accounts: Accounts) -> Accounts:
        return tuple(self._find_share(each) for each in accounts)

    def _find_share(self, account: Account) -> Account:
        party = account.party
        known = self._shares.get(party.address)
        if known is None or known[0] is not party:
            known = self._shares[party.address] = party, self._local.open(party.share(account, self._num_gateways))
        return known[1]

    async def _beat(self) -> None:
        if self.is_up:
            await self._show_life(self._name)
        if not self.is_up:  # maybe only since the line before
            name = token_hex(6)
            await self._counter.load()
            await self._show_life(name)
            self._name = name
            self._outage.end()
            self._send_outage()

    async def _show_life(self, name: str) -> None:
        self._num_gateways = max(1, await self._counter.beat(name, LIFETIME_MS))
        self._outage.away = f"{_AWAY}, a part of {self._num_gateways}"

    def _send_outage(self) -> None:
        """Tell Redis what was used while it was away."""
        used = list(self._shares.values())
        self._local, self._shares = MemoryQuotas(self._own_clock), {}
        unsent, self._unsent = self._unsent, deque(maxlen=_MAX_UNSENT)
        for change in unsent:
            self._send(change)
        for party, account in used:
            amounts = _Amounts(*(getattr(account, each) for each in _Amounts._fields))
            self._add(party, account.day, account.month, amounts._replace(num_streams=0))

    async def close(self) -> None:
        """Send what is to be settled, and give back the rest."""
        self._beating.cancel()
        await asyncio.wait((self._beating,))
        try:
            if self._sent:
                await asyncio.wait(self._sent, timeout=_TIMEOUT_S)
            if self.is_up:
                await self._counter.leave(self._name)
        except FAILURES as error:
            log.warning("quotas in Redis are settled by the other gateways: %s", error)
        self._outage.close()
        await self._counter.close()
        await self._client.aclose()


def _amounts_of(charge: Charge) -> _Amounts:
    tokens = charge.tokens
    return _Amounts(charge.requests * MINUTE_MS, charge.streams, tokens * MINUTE_MS, tokens, tokens, charge.money)


def _parts(party: Party, day: int, month: int, amounts: _Amounts, held: _Amounts = _NOTHING) -> list[LevelChange]:
    """Return a change of the levels of a party in the order of `amounts`. Those of a day or month have it in their
    names."""
    address, requests, tokens = party.address, party.requests_per_minute, party.tokens_per_minute
    limits = (
        ("requests", requests, True),
        ("streams", party.concurrent_requests, False),
        ("tokens", tokens, True),
        (f"tokens:day:{day}", party.tokens_per_day, False),
        (f"tokens:month:{month}", party.tokens_per_month, False),
        (f"money:month:{month}", party.money_per_month, False),
    )
    parts = []
    for (name, most, is_bucket), amount, before in zip(limits, amounts, held, strict=True):
        key = f"{address}:{name}"
        if not is_bucket:
            parts.append(LevelChange(key, amount, before, -1 if most is None else most, 0, _MONTH_TTL_MS))
        elif most is None:  # what is not limited is not counted by the minute
            parts.append(LevelChange(key, 0, 0, -1, MAX_LIMIT, _MONTH_TTL_MS))
        else:
            parts.append(LevelChange(key, amount, before, most * MINUTE_MS, most, _MONTH_TTL_MS))
    return parts
