"""Builds what says who may send requests, how much, and what is written of it: keys, quotas, prices, ledger, logs."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from sluice.gateway.calls import CallLog
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.ledger import JSON, TEXT, LedgerOptions
from sluice.gateway.options.option import OptionError, as_option_error
from sluice.gateway.options.quotas import MEMORY, QuotaOptions
from sluice.gateway.options.serving import OFF
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.tenancy.access.control import AccessControl, TokenVerifier
from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.access.store import MARKER_SUFFIX, open_keys
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.gateway.tenancy.ledger.logs import AccessLog, Redaction, RequestLog, RotatingFile, StandardOutput
from sluice.gateway.tenancy.ledger.prices import PriceTable, read_prices
from sluice.gateway.tenancy.ledger.store import open_ledger
from sluice.gateway.tenancy.quotas.observer import QuotaCollector, QuotaObserver
from sluice.gateway.tenancy.quotas.store import MemoryQuotas, QuotaStore

log = logging.getLogger(__name__)

_MOST_NAMED = 10
_HOW_TO_GO_ON = (
    "`sluice keys create` makes a key. To ask nobody for one again, end the server, delete the store and the file "
    f"*{MARKER_SUFFIX} beside it, and give neither --keys-store nor --require-keys"
)


@dataclass(frozen=True, slots=True)
class Accounts:
    """The parts that identify senders and count what they use: calls, ledger, quotas."""

    calls: CallLog = field(default_factory=CallLog)
    ledger: CallLedger | None = None
    """None: no usage is kept."""
    quotas: QuotaStore | None = None
    """Where use is counted; None where it is not."""


def open_accounts(config: ServeConfig, rooms: Rooms, quotas: QuotaStore | None = None) -> Accounts:
    """Build what says who may send requests, how much, and what is written of it. Raises OptionError.

    `quotas` count the use that would be counted in memory here.
    """
    access, prices = make_access(config), _make_prices(config)
    calls = CallLog(access)
    rooms.join(notice=lambda: access.ring.problem, close=access.close)
    ledger = _make_ledger(config, rooms, calls, prices)
    _write_logs(rooms, calls, config.ledger)
    store = quotas if quotas is not None and config.quotas.store == MEMORY else _open_quotas(config.quotas)
    limit_use(rooms, calls, store, config.quotas.default_limits, prices)
    return Accounts(calls, ledger, store)


def make_access(config: ServeConfig) -> AccessControl:
    """Build what decides who may send requests. It opens the store of keys when it is started. Raises OptionError."""
    options = config.access
    place = options.store_place(config.state_folder())
    store = None if place is None else open_keys(place)
    ring = KeyRing(store, options.server_key(), is_required=options.are_keys_required)
    return AccessControl(ring, options.trusted_proxies, _make_verifier(options))


def report_access(access: AccessControl) -> None:
    """Say in the log whether requests need a key, where the keys are and how many there are. Call it at the start."""
    ring = access.ring
    place = "no store" if ring.store is None else ring.store.place
    if not access.is_enforced:
        log.info("keys are off: nobody is asked for one; sluice keys create makes the first (%s)", place)
        return
    if not ring.is_known:
        log.warning("keys are on, and those of %s cannot be read: requests are refused until they are", place)
        return
    active = [each for each in ring.keys if each.is_active]
    counts = f"{len(active)} of {len(ring.keys)} keys in {place} are active{_other_ways(access)}"
    if active or _other_ways(access):
        log.info("keys are on: %s", counts)
    else:
        log.warning("keys are on: %s, so every request is refused. %s", counts, _HOW_TO_GO_ON)
    _report_unnamed([each.name for each in active if each.has_unnamed_admin])


def _report_unnamed(names: list[str]) -> None:
    """Warn of keys that older versions made without groups: they have all of them."""
    if names:
        log.warning(
            "keys that have admin rights without being told, as older versions made them: %d (%s). Name the groups of "
            "each: sluice keys update NAME --groups inference,embeddings,rag",
            len(names),
            ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else ""),
        )


def _other_ways(access: AccessControl) -> str:
    """Return what else than a key of the store lets requests in; "" for nothing."""
    ways = ["--api-key"] if access.ring.has_server_key else []
    ways += ["tokens of --jwt-issuer"] if access.takes_tokens else []
    return f", beside {' and '.join(ways)}" if ways else ""


def _make_verifier(options: AccessOptions) -> TokenVerifier | None:
    if options.jwt_issuer is None or options.jwt_audience is None:
        return None
    try:
        from sluice.gateway.tenancy.access.tokens import IssuerTokens, TokenSettings  # few servers need PyJWT
    except ImportError as error:
        raise OptionError(f"--jwt-issuer needs PyJWT ({error}): pip install 'sluice[jwt]'") from None
    claims = options.jwt_claims or {}
    return IssuerTokens(TokenSettings(options.jwt_issuer, options.jwt_audience, options.jwt_jwks_url, claims))


def _make_prices(config: ServeConfig) -> PriceTable:
    """Read the price table; without one all is free. Raises OptionError."""
    path = config.ledger.price_table
    try:
        return PriceTable() if path is None else read_prices(path)
    except ValueError as error:
        raise OptionError(str(error)) from None


def limit_use(
    rooms: Rooms, calls: CallLog, store: QuotaStore, default_limits: QuotaLimits, prices: PriceTable | None = None
) -> None:
    """Hold requests to the limits of their keys and tenants. The rooms close the store."""
    ring = calls.access.ring
    quotas = QuotaObserver(store, lambda: ring.tenants, default_limits, prices.price if prices is not None else None)
    calls.observe(quotas, only_known=True)
    rooms.join(QuotaCollector(quotas), notice=lambda: store.problem, close=store.close)


def _open_quotas(options: QuotaOptions) -> QuotaStore:
    """Open the place where use is counted."""
    if options.store == MEMORY:
        return MemoryQuotas()
    from sluice.gateway.tenancy.quotas.redis_store import RedisQuotas  # few servers need Redis' client

    return RedisQuotas(options.store)


def _make_ledger(config: ServeConfig, rooms: Rooms, calls: CallLog, prices: PriceTable) -> CallLedger | None:
    """Build the ledger, which observes `calls`; None where there is none. Raises OptionError."""
    options = config.ledger
    place = options.store_place(config.state_folder())
    if place is None:
        return None
    with as_option_error():
        store = open_ledger(place)
    only_known = options.place is None
    ledger = CallLedger(store, prices, retention_days=options.retention_days, only_known=only_known)
    calls.observe(ledger, only_known=only_known)
    rooms.join(ledger, notice=lambda: ledger.problem, close=ledger.close)
    return ledger


def _write_logs(rooms: Rooms, calls: CallLog, options: LedgerOptions) -> None:
    """Have the lines of the access log and of the request log written, where they are wanted."""
    logs: list[AccessLog | RequestLog] = []
    if options.access_log != OFF:
        logs.append(AccessLog(StandardOutput(), is_json=options.access_log == JSON))
    if options.request_log is not None:
        file = RotatingFile(Path(options.request_log), options.request_log_max_bytes, options.request_log_max_days)
        redaction = Redaction(options.request_log_redact)
        keeps_text = options.request_log_content == TEXT
        logs.append(RequestLog(file, redaction, sample_rate=options.request_log_sample_rate, keeps_text=keeps_text))
    for each in logs:
        calls.observe(each)
        rooms.join(each, close=each.close)
