"""When a request is served and until when: its headers, the same for every protocol, over its body."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from gateway.options.config import RequestOptions
from sluice.errors import invalid

TENANT = "x-sluice-tenant"
PRIORITY = "x-sluice-priority"
TIMEOUT = "x-sluice-timeout-ms"
QUEUE_TIMEOUT = "x-sluice-queue-timeout-ms"
STICKY = "x-sluice-sticky"

MAX_TENANT_LENGTH = 128
LONGEST_S = 1e7
"""About four months: what is longer is no deadline."""
_PRIORITIES = range(-(2**31), 2**31)

OPENAPI_PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": "header", "schema": {"type": kind}, "description": description}
    for name, kind, description in (
        (TENANT, "string", "Whom served tokens are charged to: tenants share the engine by their weights."),
        (PRIORITY, "integer", "Lower runs earlier. Wins over the body's priority."),
        (TIMEOUT, "integer", "Milliseconds from arrival to the last token; then the request ends in 504."),
        (QUEUE_TIMEOUT, "integer", "Milliseconds from arrival to admission; then the request ends in 504."),
        (STICKY, "string", "Requests with the same text get the same version of a model whose versions share them."),
    )
]
"""What /docs says of the headers."""

T = TypeVar("T")


class SchedulingFields(TypedDict):
    """Fields of a TextRequest."""

    tenant: str
    priority: int
    timeout_s: float | None
    queue_timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What the headers say, and what holds where neither they nor the body do. None: they do not say."""

    defaults: RequestOptions
    tenant: str = ""
    priority: int | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    sticky_key: str = ""

    def fields(self, priority: int | None, timeout_s: float | None = None) -> SchedulingFields:
        """With what the body says. A header wins over it, as it may come from a proxy that knows the client."""
        return {
            "tenant": self.tenant,
            "priority": _first(self.priority, priority) or 0,
            "timeout_s": _first(self.timeout_s, timeout_s, self.defaults.timeout_s),
            "queue_timeout_s": _first(self.queue_timeout_s, self.defaults.queue_timeout_s),
        }


def scheduling_of(headers: Mapping[str, str], defaults: RequestOptions) -> Scheduling:
    """What `headers` ask for. Raises INVALID, naming the header."""
    return Scheduling(
        defaults,
        tenant=_tenant(headers.get(TENANT, "")),
        priority=_priority(headers.get(PRIORITY)),
        timeout_s=_seconds(headers, TIMEOUT),
        queue_timeout_s=_seconds(headers, QUEUE_TIMEOUT),
        sticky_key=headers.get(STICKY, ""),
    )


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _tenant(value: str) -> str:
    if len(value) > MAX_TENANT_LENGTH or not value.isprintable():
        raise invalid(TENANT, f"{TENANT} must have at most {MAX_TENANT_LENGTH} printable characters")
    return value


def _priority(value: str | None) -> int | None:
    if value is None:
        return None
    if not re.fullmatch(r"[+-]?\d{1,10}", value, re.ASCII) or int(value) not in _PRIORITIES:
        raise invalid(PRIORITY, f"{PRIORITY} must be a 32-bit integer (lower runs earlier), got {value[:40]!r}")
    return int(value)


def _seconds(headers: Mapping[str, str], name: str) -> float | None:
    value = headers.get(name)
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,12}", value, re.ASCII) or not 0 < int(value) / 1000 <= LONGEST_S:
        most = int(LONGEST_S * 1000)
        raise invalid(name, f"{name} must be a whole number of milliseconds from 1 to {most}, got {value[:40]!r}")
    return int(value) / 1000
