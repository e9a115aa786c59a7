"""Quotas of workers: the host counts for all of them, so that limits hold however requests are spread."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.quotas.account import Account, Accounts, Charge, Hold, Party, Refusal
from sluice.gateway.tenancy.quotas.store import QuotaStore, SeenAccounts, settle_whole
from sluice.gateway.workers.private import Peer

_STATE = (
    *("at", "request_level", "token_level", "day", "day_tokens", "month", "month_tokens", "month_money"),
    "num_streams",
)
"""The numbers of an account."""


class Reserve(msgspec.Struct, frozen=True):
    """Ask the host to reserve a charge of all parties. `worker` is the asking process, `hold` what the same request
    holds already, 0 for nothing."""

    worker: int
    parties: list[Party]
    charge: Charge
    hold: int


class Decision(msgspec.Struct, frozen=True):
    """The answer to `Reserve`: the number of a hold, 0 with a refusal; and the parties' accounts now."""

    hold: int
    refused: Refusal | None
    accounts: list[list[int]]
    """The values of `_STATE`."""


class Settle(msgspec.Struct, frozen=True):
    """Replace a hold by what was used, tokens as each account counts them."""

    worker: int
    hold: int
    tokens: list[int]
    money: int


class HostQuotas(SeenAccounts):
    """Asks the host. Belongs to the event loop."""

    problem = ""

    def __init__(self, host: Peer, worker: int) -> None:
        super().__init__()
        self._host = host
        self._worker = worker
        self._open: set[asyncio.Task[Decision]] = set()
        self._settling: set[asyncio.Task[None]] = set()

    def accounts(self) -> Iterator[Account]:
        """Yield nothing: the host shows how much of each limit is used."""
        return iter(())

    def current(self, accounts: Accounts) -> Accounts:
        return accounts

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        held = hold.place if hold is not None else 0
        assert isinstance(held, int)
        question = Reserve(self._worker, [each.party for each in accounts], charge, held)
        asking = asyncio.create_task(self._host.ask("reserve", question, Decision))
        self._open.add(asking)
        asking.add_done_callback(self._open.discard)
        try:
            decision = await asyncio.shield(asking)
        except asyncio.CancelledError:
            if not held:  # the host may decide all the same
                asking.add_done_callback(self._give_back)
            raise
        except OSError:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server's host process is away") from None
        for account, state in zip(accounts, decision.accounts, strict=True):
            for name, value in zip(_STATE, state, strict=True):
                setattr(account, name, value)
        if decision.refused is not None:
            return decision.refused
        return Hold(decision.hold, charge, accounts[0]) if hold is None else _extend(hold, charge)

    def settle(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        assert isinstance(hold.place, int)
        self._send(Settle(self._worker, hold.place, list(tokens), money))

    def _give_back(self, asking: "asyncio.Task[Decision]") -> None:
        """Give back what was reserved for a request that has ended meanwhile."""
        if not asking.cancelled() and asking.exception() is None and asking.result().hold:
            self._send(Settle(self._worker, asking.result().hold, [0] * len(asking.result().accounts), 0))

    def _send(self, message: Settle) -> None:
        sending = asyncio.create_task(self._settle(message))
        self._settling.add(sending)
        sending.add_done_callback(self._settling.discard)

    async def _settle(self, message: Settle) -> None:
        try:
            await self._host.ask("settle", message, bool)
        except OSError:
            return  # the host, and with it all that it has counted, is lost

    async def close(self) -> None:
        """Wait until the host knows what was used."""
        while self._open or self._settling:
            await asyncio.wait((*self._open, *self._settling))


def _extend(hold: Hold, charge: Charge) -> Hold:
    """Return the hold with a later charge. The host keeps the parts of one hold, whatever their days."""
    hold.tokens += charge.tokens
    hold.money += charge.money
    return hold


class QuotaDesk:
    """Answers one worker from the host's store, and gives back what it holds when it is lost."""

    def __init__(self, store: QuotaStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._holds: dict[int, tuple[Accounts, Hold]] = {}
        self._is_closed = False

    async def reserve(self, asked: Reserve) -> Decision:
        """Reserve what a worker asks for. Nothing where it is lost, or has settled the hold meanwhile: the request that
        asked has ended then."""
        accounts = tuple(self._store.open(each) for each in asked.parties)
        if self._is_closed or (asked.hold and asked.hold not in self._holds):
            return Decision(0, None, _states(accounts))
        earlier = self._holds[asked.hold][1] if asked.hold else None
        found = await self._store.reserve(accounts, asked.charge, earlier)
        if isinstance(found, Hold):
            number = asked.hold or next(self._numbers)
            self._holds[number] = accounts, found
            return Decision(number, None, _states(accounts))
        return Decision(0, found, _states(accounts))

    def settle(self, asked: Settle) -> None:
        """Replace a hold by what was used."""
        held = self._holds.pop(asked.hold, None)
        if held is not None:
            settle_whole(self._store, *held, asked.tokens, asked.money)

    def close(self) -> None:
        """Give back what the worker held: nobody knows what it had used."""
        self._is_closed = True
        for accounts, hold in self._holds.values():
            settle_whole(self._store, accounts, hold, [0] * len(accounts), 0)
        self._holds.clear()


def _states(accounts: Accounts) -> list[list[int]]:
    return [[getattr(each, name) for name in _STATE] for each in accounts]
