"""Where use is counted: in the memory of one gateway, or in a Redis that several share."""

from collections.abc import Callable, Iterator, Sequence
from time import time
from typing import Protocol

from sluice.gateway.tenancy.quotas.account import Account, Accounts, Charge, Hold, Party, Refusal, explain
from sluice.state.calendar_clock import CalendarClock

_FIRST_SWEEP = 10_000
_MAX_SEEN = 50_000


def wall_ms() -> int:
    """Return the milliseconds since 1970."""
    return int(time() * 1000)


def calendar_ms() -> Callable[[], int]:
    """Make a clock of milliseconds since 1970, which ignores short jumps of the machine's."""
    clock = CalendarClock()
    return lambda: int(clock() * 1000)


class QuotaStore(Protocol):
    """Counts use. Belongs to the event loop."""

    generation: int
    """Changes when idle accounts were forgotten: those that `open` has returned before are no longer counted."""

    @property
    def problem(self) -> str:
        """Why limits are not shared with other gateways now, "" where they are."""

    def open(self, party: Party) -> Account:
        """Return the account of a party, with its limits as they are now."""

    def accounts(self) -> Iterator[Account]:
        """Yield the accounts, as they are now as far as this gateway knows."""

    def current(self, accounts: Accounts) -> Accounts:
        """Return those by which requests are decided now."""

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        """Count a charge in all accounts, or in none where a limit of one refuses it.

        `hold` is what the same request holds already; the one that is returned contains it.
        """

    def settle(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        """Replace a hold by what was used, tokens as each account counts them."""

    async def close(self) -> None: ...


class SeenAccounts:
    """Accounts that are counted elsewhere, as they were last seen, where not too many have come."""

    def __init__(self, clock: Callable[[], int] = wall_ms) -> None:
        self.generation = 0
        self._clock = clock
        self._seen: dict[str, Account] = {}

    def open(self, party: Party) -> Account:
        found = self._seen.get(party.address)
        if found is None:
            if len(self._seen) >= _MAX_SEEN:
                self._seen, self.generation = {}, self.generation + 1
            found = self._seen[party.address] = Account(party)
            found.advance(self._clock())
        found.party = party
        return found


class MemoryQuotas:
    """Counts the use of one gateway. What is idle is forgotten when many accounts have come."""

    problem = ""

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        """`clock` returns milliseconds since 1970; None: one that ignores short jumps of the machine's."""
        self.generation = 0
        self._clock = clock or calendar_ms()
        self._accounts: dict[str, Account] = {}
        self._sweeps_at = _FIRST_SWEEP

    def open(self, party: Party) -> Account:
        found = self._accounts.get(party.address)
        if found is None:
            if len(self._accounts) >= self._sweeps_at:
                self._sweep()
            found = self._accounts[party.address] = Account(party)
        found.advance(self._clock())
        found.party = party
        return found

    def accounts(self) -> Iterator[Account]:
        now = self._clock()
        for account in list(self._accounts.values()):
            account.advance(now)
            yield account

    def current(self, accounts: Accounts) -> Accounts:
        return accounts

    def _sweep(self) -> None:
        """Forget what is idle. The next sweep comes when twice as many accounts are there: each costs little."""
        self._accounts = {each.party.address: each for each in self.accounts() if not each.is_idle}
        self._sweeps_at = max(_FIRST_SWEEP, 2 * len(self._accounts))
        self.generation += 1

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        now = self._clock()
        for each in accounts:
            each.advance(now)
            if not each.fits(charge):
                for other in accounts:
                    other.advance(now)
                refusal = explain(accounts, charge, hold)
                assert refusal is not None
                return refusal
        for each in accounts:
            each.add(charge)
        if hold is None:
            return Hold(self, charge, each)
        return hold.extend(self, charge, each)

    def settle(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        now = self._clock()
        for each, used in zip(accounts, tokens, strict=True):
            each.advance(now)
            each.settle(hold, used, money)

    async def close(self) -> None: ...


def settle_whole(store: QuotaStore, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
    """Settle a hold and what the same request holds besides: each as much as was reserved, the first one the rest."""
    while hold.earlier is not None:
        part, paid = [min(each, hold.tokens) for each in tokens], min(money, hold.money)
        store.settle(accounts, hold, part, paid)
        tokens, money = [each - taken for each, taken in zip(tokens, part, strict=True)], money - paid
        hold = hold.earlier
    store.settle(accounts, hold, tokens, money)
