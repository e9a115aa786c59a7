"""Builds what says who may send requests, how much, and what is written of it: keys, quotas, prices, ledger, logs."""

import logging
from pathlib import Path

from gateway.access.control import AccessControl, TokenVerifier
from gateway.access.identity import QuotaLimits
from gateway.access.ring import KeyRing
from gateway.access.store import open_keys
from gateway.calls import CallLog
from gateway.ledger.access_log import AccessLog
from gateway.ledger.ledger import CallLedger
from gateway.ledger.lines import RotatingFile, StandardOutput
from gateway.ledger.opening import open_ledger
from gateway.ledger.prices import PriceTable, read_prices
from gateway.ledger.request_log import Redaction, RequestLog
from gateway.options.access import AccessOptions
from gateway.options.config import ServeConfig
from gateway.options.ledger import JSON, TEXT, LedgerOptions
from gateway.options.option import OptionError, as_option_error
from gateway.options.quotas import MEMORY, QuotaOptions
from gateway.options.serving import OFF
from gateway.quotas.metrics import QuotaCollector
from gateway.quotas.observer import QuotaObserver
from gateway.quotas.store import MemoryQuotas, QuotaStore
from gateway.service import InferenceService

log = logging.getLogger(__name__)


def make_access(config: ServeConfig) -> AccessControl:
    """Build what decides who may send requests. It opens the store of keys when it is started. Raises OptionError."""
    options = config.access
    place = options.store_place(config.state_folder())
    if place is not None and options.keys_store is None and not _is_reachable(Path(place)):
        log.warning("no keys are read: %s is not accessible; --keys-store names another place", place)
        place = None
    ring = KeyRing(None if place is None else open_keys(place), options.server_key())
    return AccessControl(ring, options.trusted_proxies, _make_verifier(options))


def _is_reachable(path: Path) -> bool:
    try:
        path.exists()
    except OSError:
        return False
    return True


def _make_verifier(options: AccessOptions) -> TokenVerifier | None:
    if options.jwt_issuer is None or options.jwt_audience is None:
        return None
    try:
        from gateway.access.tokens import IssuerTokens, TokenSettings  # few servers need PyJWT
    except ImportError as error:
        raise OptionError(f"--jwt-issuer needs PyJWT ({error}): pip install 'sluice[jwt]'") from None
    claims = options.jwt_claims or {}
    return IssuerTokens(TokenSettings(options.jwt_issuer, options.jwt_audience, options.jwt_jwks_url, claims))


def make_prices(config: ServeConfig) -> PriceTable:
    """Read the price table; without one all is free. Raises OptionError."""
    path = config.ledger.price_table
    try:
        return PriceTable() if path is None else read_prices(path)
    except ValueError as error:
        raise OptionError(str(error)) from None


def limit_use(
    service: InferenceService, store: QuotaStore, default_limits: QuotaLimits, prices: PriceTable | None = None
) -> None:
    """Hold the service's requests to the limits of their keys and tenants. It closes the store."""
    service.quotas = store
    ring = service.calls.access.ring
    quotas = QuotaObserver(store, lambda: ring.tenants, default_limits, prices.price if prices is not None else None)
    service.calls.observe(quotas, only_known=True)
    service.metrics.registry.register(QuotaCollector(quotas))
    service.notices.append(lambda: store.problem)
    service.close_last(store.close)


def open_quotas(options: QuotaOptions) -> QuotaStore:
    """Open the place where use is counted."""
    if options.store == MEMORY:
        return MemoryQuotas()
    from gateway.quotas.redis_store import RedisQuotas  # few servers need Redis' client

    return RedisQuotas(options.store)


def make_ledger(config: ServeConfig, calls: CallLog, prices: PriceTable) -> CallLedger | None:
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
    return ledger


def write_logs(service: InferenceService, options: LedgerOptions) -> None:
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
        service.calls.observe(each)
        service.metrics.registry.register(each)
        service.close_last(each.close)
