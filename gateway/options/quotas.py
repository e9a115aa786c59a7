"""Options of quotas: where use is counted, and the limits of keys without their own."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from sluice.errors import SluiceError
from sluice.gateway.options.option import option
from sluice.gateway.tenancy.access.identity import NO_LIMITS, QuotaLimits
from sluice.gateway.tenancy.access.keys import parse_limits

MEMORY = "memory"


def quota_store(text: str) -> str:
    """Parse `memory`, or the URL of a Redis."""
    allowed = "memory or redis://HOST:PORT/DB"
    try:
        parts = urlsplit(text)
        is_redis = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(allowed) from None
    if text != MEMORY and not (is_redis and text.isprintable()):
        raise ValueError(allowed)
    return text


def limits(text: str) -> QuotaLimits:
    """Parse limits, such as requests_per_minute=60,tokens_per_day=1000000."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in QuotaLimits.__struct_fields__ or name in fields:
            raise ValueError(f"limits such as requests_per_minute=60, of: {', '.join(QuotaLimits.__struct_fields__)}")
        fields[name] = value
    try:
        return parse_limits({"limits": fields}, is_text=True)
    except SluiceError as error:
        raise ValueError(f"limits with numbers ({error.message})") from None


@dataclass(frozen=True, slots=True)
class QuotaOptions:
    """Quotas: what keys and tenants may use"""

    store: str = option(
        "--quota-store",
        MEMORY,
        quota_store,
        "memory|URL",
        "store of the usage: the memory of this server, or a Redis (6.2 or later) that gateways share",
        secret=True,
    )
    default_limits: QuotaLimits = option(
        "--default-limits",
        NO_LIMITS,
        limits,
        "NAME=NUMBER,...",
        "limits of each key that has none of its own, such as requests_per_minute=60,tokens_per_minute=100000. Also: "
        "tokens_per_day, tokens_per_month, money_per_month, concurrent_requests, queued_requests, cached_token_rate",
    )
