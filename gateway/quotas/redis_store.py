"""Quotas in a Redis that gateways share. Where it is away, each goes on with its share, and settles afterwards."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha1
from secrets import token_hex
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sluice.gateway.quotas.account import Account, Accounts, Charge, Hold, Party, Refusal, explain
from sluice.gateway.quotas.script import SCRIPT
from sluice.gateway.quotas.store import MemoryQuotas, wall_ms
from sluice.serving.caching.redis_commands import FAILURES, CommandBatcher

log = logging.getLogger(__name__)

_DIGEST = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_TIMEOUT_S = 1.0
"""How long a request waits for Redis before it is decided here."""
_BEAT_S = 1.0
_RETRY_S = 0.5
LIFETIME_MS = 10_000
"""How long a gateway may be silent until the others give back what it holds."""
_MAX_UNSENT = 100_000
_MAX_SEEN = 50_000
_WIDTH = 4
"""Batches in flight at once."""
_FIELDS = (
    "request_level",
    "token_level",
    "at",
    "day",
    "day_tokens",
    "month",
    "month_tokens",
    "month_money",
    "num_streams",
)
"""Fields of an account in the order of the script's answers."""
_AWAY = "the quota store is away: this gateway allows its share of each limit"
Command = tuple[Any, ...]
"""Arguments of the script."""


class RedisQuotas:
    """Counts use in Redis: one round trip for each reservation, and nobody waits for a settlement.

    A command that fails or takes too long means that Redis is away. From then on a gateway has, until Redis answers
    again, an equal part of what each party may use, by the number of gateways last seen. Then it adds what was used.
    It returns under another name: what it held under the old one, also by commands whose answer was lost, expires.
    To be made on the event loop.
    """

    def __init__(self, url: str, clock: Callable[[], int] | None = None) -> None:
        """Connects by itself, again after an outage. `clock` None: Redis' own. Raises ValueError for a wrong URL."""
        self.generation = 0
        self.is_up = False
        self._clock = clock
        self._client = Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        self._name = token_hex(6)
        self._num_gateways = 1
        self._seen: dict[str, Account] = {}
        """What Redis has last answered about each party."""
        self._local = MemoryQuotas(clock)
        """Counts while Redis is away."""
        self._shares: dict[str, tuple[Party, Account]] = {}
        """Parties with their accounts in `_local`, by address."""
        self._unsent: deque[Command] = deque(maxlen=_MAX_UNSENT)
        """Commands that change what was used, to be sent when Redis is back."""
        self._sent: set[asyncio.Future[list[int] | None]] = set()
        self._is_reported = False
        self._num_failures = 0
        """In a row, since Redis has last come back."""
        self._batcher: CommandBatcher[Command, list[int] | None] = CommandBatcher(
            self._send_many, None, self, max_wait_s=_TIMEOUT_S, width=_WIDTH
        )
        self._beating = asyncio.create_task(self._beat_forever(), name="quotas")

    @property
    def problem(self) -> str:
        return "" if self.is_up else _AWAY

    def open(self, party: Party) -> Account:
        found = self._seen.get(party.address)
        if found is None:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
                self.generation += 1
            found = self._seen[party.address] = Account(party)
            found.advance((self._clock or wall_ms)())
        found.party = party
        return found

    def accounts(self) -> Iterator[Account]:
        now = (self._clock or wall_ms)()
        for account in list(self._seen.values()):
            account.advance(max(now, account.at))
            yield account

    def current(self, accounts: Accounts) -> Accounts:
        return accounts if self.is_up else self._find_shares(accounts)

    async def reserve(self, accounts: Accounts, charge: Charge, hold: Hold | None) -> Hold | Refusal:
        name = self._name
        if not any(_concerns(each.party, charge) for each in accounts):
            return Hold(name, Charge(), accounts[0]) if hold is None else hold
        command = ["reserve", name, self._time(), *msgspec.structs.astuple(charge)]
        for each in accounts:
            party = each.party
            command += (party.address, *_limits(party, "requests_per_minute", "tokens_per_minute", "tokens_per_day"))
            command += _limits(party, "tokens_per_month", "money_per_month", "concurrent_requests")
        answer = await self._batcher.put(tuple(command))
        if answer is None:
            return await self._local.reserve(self._find_shares(accounts), charge, hold)
        for number, account in enumerate(accounts):
            first = 1 + number * len(_FIELDS)
            for field, value in zip(_FIELDS, answer[first : first + len(_FIELDS)], strict=True):
                setattr(account, field, value)
        if answer[0]:
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
            command = ["settle", hold.place, self._time(), hold.at, hold.day, hold.month]
            command += (hold.tokens, hold.money, money, hold.streams)
            for each, used in zip(accounts, tokens, strict=True):
                each.settle(hold, used, money)  # for the metrics, until Redis says how it is
                command += (each.party.address, *_limits(each.party, "requests_per_minute", "tokens_per_minute"), used)
            self._send(tuple(command))

    def _settle_late(self, accounts: Accounts, hold: Hold, tokens: Sequence[int], money: int) -> None:
        """Settle what was held here in an outage that is over: all of it was added to what Redis has."""
        late = Account(accounts[0].party)
        late.day, late.month, late.month_money = hold.day, hold.month, money - hold.money
        for each, used in zip(accounts, tokens, strict=True):
            late.day_tokens = late.month_tokens = used - hold.tokens
            self._send(self._addition(each.party, late))

    def _time(self) -> int:
        """Return the time of a command; 0: Redis' own."""
        return 0 if self._clock is None else self._clock()

    # --- commands ---

    def _send(self, command: Command) -> None:
        """Send a command, again after an outage where it has no answer."""

        def keep(answer: "asyncio.Future[list[int] | None]") -> None:
            self._sent.discard(answer)
            if not answer.cancelled() and answer.result() is None:
                self._unsent.append(command)

        sent = self._batcher.put(command)
        self._sent.add(sent)
        sent.add_done_callback(keep)

    async def _send_many(self, commands: list[Command]) -> list[list[int] | None]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.evalsha(_DIGEST, 0, *command)
        answers = await pipeline.execute(raise_on_error=False)
        failures = [each for each in answers if isinstance(each, Exception)]
        if failures:
            self.failed(failures[0])
        return [None if isinstance(each, Exception) else each for each in answers]

    # --- outages ---

    def succeeded(self) -> None:
        """Do nothing: only an answer to a beat ends an outage."""

    def failed(self, error: Exception) -> None:
        """Go on without Redis. At its start a server is too busy to hear the first answer in time."""
        self._num_failures += 1
        is_outage, self.is_up = self.is_up or self._num_failures > 1, False
        if is_outage and not self._is_reported:
            reason = str(error) or type(error).__name__
            log.warning("%s, a part of %d: %s", _AWAY, self._num_gateways, reason)
            self._is_reported = True

    def _find_shares(self, accounts: Accounts) -> Accounts:
        return tuple(self._find_share(each) for each in accounts)

    def _find_share(self, account: Account) -> Account:
        party = account.party
        known = self._shares.get(party.address)
        if known is None or known[0] is not party:
            known = self._shares[party.address] = party, self._local.open(party.share(account, self._num_gateways))
        return known[1]

    async def _beat_forever(self) -> None:
        while True:
            try:
                await self._beat()
            except FAILURES as error:
                self.failed(error)
            await asyncio.sleep(_BEAT_S if self.is_up else _RETRY_S)

    async def _beat(self) -> None:
        was_up, name = self.is_up, self._name if self.is_up else token_hex(6)
        if not was_up:
            await self._client.script_load(SCRIPT)
        self._num_gateways = max(1, int(await self._run("beat", name, self._time(), LIFETIME_MS)))
        if not was_up:
            self._return(name)

    async def _run(self, *command: Any) -> Any:
        return await self._client.evalsha(_DIGEST, 0, *command)

    def _return(self, name: str) -> None:
        """Count in Redis again, and tell it what was used meanwhile."""
        if self._is_reported:
            log.warning("the quota store answers again")
        self._num_failures = 0
        self._name, self.is_up, self._is_reported = name, True, False
        used = [self._addition(party, account) for party, account in self._shares.values()]
        self._local, self._shares = MemoryQuotas(self._clock), {}
        unsent, self._unsent = self._unsent, deque(maxlen=_MAX_UNSENT)
        for command in (*unsent, *used):
            self._send(command)

    def _addition(self, party: Party, account: Account) -> Command:
        limits = _limits(party, "requests_per_minute", "tokens_per_minute")
        levels = account.request_level, account.token_level
        days = account.day, account.day_tokens, account.month, account.month_tokens, account.month_money
        return "add", self._time(), party.address, *limits, *levels, *days

    async def close(self) -> None:
        """Send what is to be settled, and give back the rest."""
        self._beating.cancel()
        await asyncio.wait((self._beating,))
        try:
            if self._sent:
                await asyncio.wait(self._sent, timeout=_TIMEOUT_S)
            if self.is_up:
                await self._run("leave", self._name)
        except FAILURES as error:
            log.warning("quotas in Redis are settled by the other gateways: %s", error)
        self.is_up = False
        await self._batcher.close()
        await self._client.aclose()


def _concerns(party: Party, charge: Charge) -> bool:
    """Whether the party has a limit of what is charged: what is not limited costs no round trip."""
    if charge.streams and not (party.requests_per_minute is None and party.concurrent_requests is None):
        return True
    tokens = party.tokens_per_minute, party.tokens_per_day, party.tokens_per_month, party.money_per_month
    return bool(charge.tokens) and tokens != (None, None, None, None)


def _limits(party: Party, *names: str) -> list[int]:
    """Return limits as the script takes them: -1 is none."""
    return [-1 if (most := getattr(party, name)) is None else most for name in names]
