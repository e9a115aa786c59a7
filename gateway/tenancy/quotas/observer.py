"""Quotas of the calls of a server: reserves before work, settles after it, and tells clients what is left."""

import logging
from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf
from operator import attrgetter
from typing import NoReturn

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import NO_RETRY, Call, CallObserver, Headers
from sluice.gateway.tenancy.access.identity import NO_LIMITS, Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.quotas.account import (
    MICROS,
    Account,
    Accounts,
    Charge,
    Hold,
    Level,
    Refusal,
    make_party,
    period_of,
)
from sluice.gateway.tenancy.quotas.store import QuotaStore, settle_whole

log = logging.getLogger(__name__)

_LIMITED_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
_BEGIN = Charge(requests=1, streams=1)
_MAX_COUNTED = 10_000
"""Most limits and tenants whose refusals are told apart: clients may name tenants."""
_MAX_SENDERS = 20_000
"""Most senders whose accounts are remembered; past that all are looked up again."""
_TOKEN_LIMITS = ("tokens_per_minute", "tokens_per_day", "tokens_per_month")
_BUDGETS = frozenset({"tokens_per_day", "tokens_per_month", "money_per_month"})
"""Limits that are used up; the others hold for a moment."""
_UNITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens a day",
    "tokens_per_month": "tokens a month",
    "money_per_month": "a month",
    "concurrent_requests": "requests at a time",
    "queued_requests": "waiting requests",
}
_MAX_NAMES = 100
"""Most tenants, and most keys, that labels name: those that came first. Refusals of others count under `other`."""
_OTHER = "other"
ComputePrice = Callable[[str, str, int, int, int], int]
"""Returns the price of a model, its adapter, and prompt, cached and generated tokens, in millionths of money."""


class Reservation:
    """The hold of a call, and its accounts."""

    __slots__ = ("accounts", "hold", "is_hopeless", "spare", "waits")

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.hold: Hold | None = None
        """None for a call that was refused at its beginning."""
        self.is_hopeless = False
        """Whether another try would be refused too."""
        self.spare = (0, 0)
        """Tokens of a prompt and of an answer that are reserved for a generation which another takes the place of."""
        self.waits = False
        """Whether it counts among those that wait for their first token."""


class QuotaObserver(CallObserver):
    """Holds calls to the limits of their key and of its tenant. Belongs to the event loop.

    A request counts when it begins, and with it one that is open. Its tokens and their price are reserved before each
    generation with the most that it may use, and settled at the end of the call.
    """

    def __init__(
        self,
        store: QuotaStore,
        find_tenants: Callable[[], Mapping[str, QuotaLimits]] = dict,
        default_limits: QuotaLimits = NO_LIMITS,
        price: ComputePrice | None = None,
    ) -> None:
        """`find_tenants` returns the limits of tenants, and another object when they have changed. `default_limits` are
        those of keys without any. `price` None: nothing costs anything."""
        self.store = store
        self.refusals: dict[tuple[str, str, str], int] = {}
        """Numbers of refusals by limit, scope and tenant."""
        self._find_tenants = find_tenants
        self._tenants: Mapping[str, QuotaLimits] = {}
        self._default_limits = default_limits
        self._price = price
        self._generation = store.generation
        self._senders: dict[tuple[str, str], tuple[Identity | None, Accounts]] = {}
        self._open: dict[Call, Reservation] = {}
        self._waiting: dict[str, list[Call]] = {}
        """Calls that wait for their first token, by the address of parties that may have only so many."""

    async def begin(self, call: Call) -> None:
        """Count a request. Raises OVERLOADED where a limit refuses it."""
        if call.group not in _LIMITED_GROUPS or (call.identity is None and not call.tenant):
            return
        accounts = self._find_accounts(call.identity, call.tenant)
        if not accounts:
            return
        reservation = self._open[call] = Reservation(accounts)
        held = await self.store.reserve(accounts, _BEGIN, None)
        if not isinstance(held, Hold):
            self._refuse(call, reservation, held)
        reservation.hold = held

    async def admit(self, call: Call, prompt_tokens: int, max_tokens: int) -> None:
        """Reserve what a generation may use. Raises OVERLOADED where a limit refuses it."""
        reservation = self._open.get(call)
        if reservation is None or reservation.hold is None:
            return
        for account in reservation.accounts:
            if account.party.queued_requests is not None:
                self._wait(call, reservation)
                break
        spare_prompt, spare_output = reservation.spare
        prompt_tokens, max_tokens = max(0, prompt_tokens - spare_prompt), max(0, max_tokens - spare_output)
        reservation.spare = (0, 0)
        money = 0 if self._price is None else self._price(call.model, call.adapter, prompt_tokens, 0, max_tokens)
        charge = Charge(0, prompt_tokens + max_tokens, money)
        held = await self.store.reserve(reservation.accounts, charge, reservation.hold)
        if not isinstance(held, Hold):
            self._refuse(
                call, reservation, held, f": {prompt_tokens} of the prompt and up to {max_tokens} of the answer"
            )
        reservation.hold = held

    def leave(self, call: Call, prompt_tokens: int, max_tokens: int) -> None:
        """Keep what is reserved for the next generation."""
        if (reservation := self._open.get(call)) is not None:
            spare_prompt, spare_output = reservation.spare
            reservation.spare = (spare_prompt + prompt_tokens, spare_output + max_tokens)

    def answer_headers(self, call: Call) -> Headers:
        """Return what is left of the call's limits."""
        reservation = self._open.get(call)
        if reservation is None:
            return []
        headers = rate_limit_headers(self.store.current(reservation.accounts))
        return [*headers, NO_RETRY] if reservation.is_hopeless else headers

    def end(self, call: Call) -> None:
        """Settle what the call holds."""
        reservation = self._open.pop(call, None)
        if reservation is None or reservation.hold is None:
            return
        if reservation.waits:
            self._stop_waiting(call, reservation)
        money = 0
        if self._price is not None:
            prompt, cached = call.prompt_tokens, call.cached_tokens
            money = self._price(call.model, call.adapter, prompt, cached, call.generated_tokens)
        tokens = [call.prompt_tokens + call.generated_tokens] * len(reservation.accounts)
        if call.cached_tokens:
            tokens = [_count_tokens(call, account.party.cached_token_rate) for account in reservation.accounts]
        settle_whole(self.store, reservation.accounts, reservation.hold, tokens, money)

    # --- who is limited ---

    def _find_accounts(self, identity: Identity | None, tenant: str) -> Accounts:
        tenants = self._find_tenants()
        if tenants is not self._tenants or self.store.generation != self._generation:
            self._senders.clear()
            self._tenants = tenants
        sender = ("" if identity is None else identity.key_id, tenant)
        known = self._senders.get(sender)
        if known is not None and known[0] is identity:
            return known[1]
        if len(self._senders) >= _MAX_SENDERS:
            self._senders.clear()
        accounts = self._open_accounts(identity, tenant)
        self._generation = self.store.generation
        self._senders[sender] = identity, accounts
        return accounts

    def _open_accounts(self, identity: Identity | None, tenant: str) -> Accounts:
        parties = []
        if identity is not None:
            limits = self._default_limits if identity.limits == NO_LIMITS else identity.limits
            parties.append(make_party("key", identity.key_id, identity.name, limits))
        if tenant in self._tenants:
            parties.append(make_party("tenant", tenant, tenant, self._tenants[tenant]))
        return tuple(self.store.open(party) for party in parties if party is not None)

    # --- waiting requests ---

    def _wait(self, call: Call, reservation: Reservation) -> None:
        """Count the call among those that wait for their first token, where that is limited. Raises OVERLOADED."""
        if reservation.waits:
            return
        limited = [each.party for each in reservation.accounts if each.party.queued_requests is not None]
        for party in limited:
            most = party.queued_requests or 0
            waiting = self._waiting.setdefault(party.address, [])
            if len(waiting) >= most:
                waiting[:] = [each for each in waiting if not each.first_token]
            if len(waiting) >= most:
                self._refuse(call, reservation, Refusal(party, "queued_requests", most, 1, 0, None if most else inf))
        for party in limited:
            self._waiting[party.address].append(call)
            reservation.waits = True

    def _stop_waiting(self, call: Call, reservation: Reservation) -> None:
        for account in reservation.accounts:
            waiting = self._waiting.get(account.party.address, [])
            if call in waiting:
                waiting.remove(call)
            if not waiting:
                self._waiting.pop(account.party.address, None)

    # --- refusals ---

    def _refuse(self, call: Call, reservation: Reservation, refusal: Refusal, why: str = "") -> NoReturn:
        tenant = call.tenant if len(self.refusals) < _MAX_COUNTED else ""
        key = refusal.limit, refusal.party.scope, tenant
        self.refusals[key] = self.refusals.get(key, 0) + 1
        reservation.is_hopeless |= refusal.wait_ms == inf
        raise refusal_error(refusal, why, self.store.problem)


def _count_tokens(call: Call, cached_rate: float) -> int:
    """Return the tokens that a call has used; those of a cached prompt count at a rate, rounded up."""
    return call.prompt_tokens + call.generated_tokens - call.cached_tokens + ceil(call.cached_tokens * cached_rate)


def refusal_error(refusal: Refusal, why: str, problem: str) -> SluiceError:
    """Return a refusal for the client: which limit of whom, what was asked and what is left."""
    party, limit, wait_ms = refusal.party, refusal.limit, refusal.wait_ms
    show = _money if limit == "money_per_month" else str
    what = "" if limit == "money_per_month" else _UNITS[limit].split()[0] + " "
    if limit in ("concurrent_requests", "queued_requests"):
        message = f"{party.scope} {party.name!r} may have {refusal.most} {_UNITS[limit]}, and has them"
    else:
        message = (
            f"{party.scope} {party.name!r} is limited to {show(refusal.most)} {_UNITS[limit]}; "
            f"{show(refusal.asked)} asked{why if what != 'requests ' else ''}, {show(refusal.left)} left"
        )
    if wait_ms == inf:
        message += ". One request may not ask for more than the whole limit" if refusal.most else ""
    elif wait_ms is not None:
        message += f". Try again in {ceil(wait_ms / 1000)} s"
    if problem:
        message += f" ({problem})"
    retry_after_s = None if wait_ms is None or wait_ms == inf else wait_ms / 1000
    code = "insufficient_quota" if limit in _BUDGETS else "rate_limit_exceeded"
    error = SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=retry_after_s, openai_code=code)
    error.is_senders_limit = True
    return error


def _money(micros: int) -> str:
    return f"{micros / MICROS:.2f}"


def rate_limit_headers(accounts: Accounts) -> Headers:
    """Return OpenAI's headers of the limits of requests and of tokens with the least left."""
    headers: Headers = []
    if requests := [level for account in accounts for level in account.request_levels()]:
        most, left, reset = _describe(requests)
        headers += (
            (b"x-ratelimit-limit-requests", most),
            (b"x-ratelimit-remaining-requests", left),
            (b"x-ratelimit-reset-requests", reset),
        )
    if tokens := [level for account in accounts for level in account.token_levels()]:
        most, left, reset = _describe(tokens)
        headers += (
            (b"x-ratelimit-limit-tokens", most),
            (b"x-ratelimit-remaining-tokens", left),
            (b"x-ratelimit-reset-tokens", reset),
        )
    return headers


def _describe(levels: list[Level]) -> tuple[bytes, bytes, bytes]:
    level = levels[0] if len(levels) == 1 else min(levels, key=attrgetter("left"))
    return b"%d" % level.most, b"%d" % max(0, level.left), format_duration(level.reset_ms).encode()


def format_duration(ms: int) -> str:
    """Write a time as OpenAI does: 120ms, 1s, 6m0s, 1h0m0s."""
    if ms < 1000:
        return f"{ms}ms"
    seconds = ceil(ms / 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def account_levels(account: Account) -> dict[str, Level]:
    """Return how much is left of each limit of an account."""
    limits = ("requests_per_minute", *_TOKEN_LIMITS, "money_per_month", "concurrent_requests")
    period = period_of(account.at)
    return {each: account.level(each, period) for each in limits if getattr(account.party, each) is not None}


class QuotaCollector(Collector):
    """Turns the plain numbers of the observer into families at each scrape, on the event loop's thread."""

    def __init__(self, quotas: QuotaObserver) -> None:
        self._quotas = quotas
        self._named: dict[str, set[str]] = {}

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("sluice_quota_store_up", "Whether quotas are counted where they should be: 1 or 0.")
        up.add_metric((), float(not self._quotas.store.problem))
        yield up
        refusals = CounterMetricFamily(
            "sluice_quota_refusals",
            "Requests refused by a limit, of a key or a tenant (scope). Tenants beyond 100 count as other.",
            labels=("limit", "scope", "tenant"),
        )
        counts: dict[tuple[str, str, str], int] = {}
        for (limit, scope, tenant), count in self._quotas.refusals.items():
            label = limit, scope, tenant if self._names("refused", tenant) else _OTHER
            counts[label] = counts.get(label, 0) + count
        for labels, count in counts.items():
            refusals.add_metric(labels, count)
        yield refusals
        yield self._use()

    def _use(self) -> Metric:
        use = GaugeMetricFamily(
            "sluice_quota_used_ratio",
            "Part of a limit that is used, with what open requests have reserved. 100 keys and 100 tenants are shown.",
            labels=("scope", "name", "limit"),
        )
        for account in self._quotas.store.accounts():
            if self._names(account.party.scope, account.party.address):
                for limit, ratio in _ratios(account):
                    use.add_metric((account.party.scope, account.party.name, limit), ratio)
        return use

    def _names(self, kind: str, name: str) -> bool:
        """Whether labels name this one."""
        named = self._named.setdefault(kind, set())
        if len(named) < _MAX_NAMES:
            named.add(name)
        return name in named


def _ratios(account: Account) -> Iterable[tuple[str, float]]:
    for limit, level in account_levels(account).items():
        yield limit, 1 - level.left / level.most if level.most else 1.0
