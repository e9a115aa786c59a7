"""Quotas of workers: the host counts for all of them, so that limits hold however requests are spread."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.quotas.account import Account, Accounts, Charge, Hold, Refusal
from sluice.gateway.tenancy.quotas.store import QuotaStore, SeenAccounts, settle_whole
from sluice.gateway.workers.messages import AccountState, Decision, Refused, Reserve, Settle


class HostQuotas(SeenAccounts):
    """Asks the host, over the link of this worker. Belongs to the event loop."""

    problem = ""

    def __init__(self, send: Callable[[Reserve | Settle], None]) -> None:
        """`send` takes the messages to the host."""
        super().__init__()
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Decision]] = {}

    def accounts(self) -> Iterator[Account]:
        """Yield nothing: the host shows how much of each limit is used."""
        return iter(())

    def current(self, accounts: Accounts) -> Accounts:
        return accounts

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        number = next(self._numbers)
        held = hold.place if hold is not None else 0
        assert isinstance(held, int)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(Reserve(number, [each.party for each in accounts], charge, held))
        try:
            decision = await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None and not held:  # it came at that very moment
                self._give_back(answer.result())
            raise
        for account, state in zip(accounts, decision.accounts, strict=True):
            _take(account, state)
        refused = decision.refused
        if refused is not None:
            party = accounts[refused.party].party
            return Refusal(party, refused.limit, refused.most, refused.asked, refused.left, refused.wait_ms)
        return Hold(decision.hold, charge, accounts[0]) if hold is None else _extend(hold, decision.hold, charge)

    def settle(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        assert isinstance(hold.place, int)
        self._send(Settle(hold.place, list(tokens), money))

    def decide(self, decision: Decision) -> None:
        """Take an answer of the host, and give back what was reserved for a request that has ended meanwhile."""
        answer = self._open.pop(decision.number, None)
        if answer is not None and not answer.done():
            answer.set_result(decision)
        elif decision.is_new:
            self._give_back(decision)

    def _give_back(self, decision: Decision) -> None:
        if decision.hold:
            self._send(Settle(decision.hold, [0] * len(decision.accounts), 0))

    def fail(self) -> None:
        """End the requests that wait for the host, which is lost."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(SluiceError(ErrorCode.UNAVAILABLE, "the server's host process is away"))

    async def close(self) -> None: ...


def _extend(hold: Hold, number: int, charge: Charge) -> Hold:
    """Return the hold with a later charge. The host keeps the parts of one hold, whatever their days."""
    hold.place = number
    hold.tokens += charge.tokens
    hold.money += charge.money
    return hold


def _take(account: Account, state: AccountState) -> None:
    for field in AccountState.__struct_fields__:
        setattr(account, field, getattr(state, field))


class QuotaDesk:
    """Answers one worker from the host's store, and gives back what it holds when it is lost."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._holds: dict[int, tuple[Accounts, Hold]] = {}

    async def reserve(self, asked: Reserve) -> Decision:
        """Reserve what a worker asks for."""
        accounts = tuple(self._store.open(each) for each in asked.parties)
        _, earlier = self._holds.get(asked.hold, (accounts, None))
        found = await self._store.reserve(accounts, asked.charge, earlier)
        if isinstance(found, Hold):
            number = asked.hold or next(self._numbers)
            self._holds[number] = accounts, found
            return Decision(asked.number, number, not asked.hold, None, _states(accounts))
        party = next(i for i, each in enumerate(accounts) if each.party == found.party)
        refused = Refused(party, found.limit, found.most, found.asked, found.left, found.wait_ms)
        return Decision(asked.number, 0, False, refused, _states(accounts))

    def settle(self, asked: Settle) -> None:
        """Replace a hold by what was used."""
        held = self._holds.pop(asked.hold, None)
        if held is not None:
            settle_whole(self._store, *held, asked.tokens, asked.money)

    def close(self) -> None:
        """Give back what the worker held: nobody knows what it had used."""
        for accounts, hold in self._holds.values():
            settle_whole(self._store, accounts, hold, [0] * len(accounts), 0)
        self._holds.clear()


def _states(accounts: Accounts) -> list[AccountState]:
    names = AccountState.__struct_fields__
    return [AccountState(*(getattr(each, name) for name in names)) for each in accounts]
