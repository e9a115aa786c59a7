"""The rights of an identity: models, adapters, priorities and networks."""

import ipaddress
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.front.restrictions import ApiCategory
from sluice.gateway.tenancy.access.identity import ANY, Identity, RouteGroup

_MAX_CACHED = 8192
_MAX_CACHED_CHARS = 256
CATEGORY_GROUPS: dict[ApiCategory, RouteGroup | None] = {
    ApiCategory.HEALTH: None,
    ApiCategory.METADATA: None,
    ApiCategory.INFERENCE: RouteGroup.INFERENCE,
    ApiCategory.SHARED_MEMORY: RouteGroup.INFERENCE,
    ApiCategory.MODEL_CONFIG: RouteGroup.INFERENCE,
    ApiCategory.MODEL_REPOSITORY: RouteGroup.REPOSITORY,
    ApiCategory.STATISTICS: RouteGroup.METRICS,
    ApiCategory.TRACE: RouteGroup.ADMIN,
    ApiCategory.LOGGING: RouteGroup.ADMIN,
}
"""The group that a key needs for a category of requests; None: every key will do."""


def may_use(identity: Identity, model: str, adapter: str = "") -> bool:
    """Whether the identity may use the model, and its adapter where one is named."""
    return _matches(identity.models, model) and (not adapter or _matches(identity.adapters, adapter))


def check_model(identity: Identity, model: str, adapter: str = "") -> None:
    """Raise FORBIDDEN for a model or an adapter that the identity may not use."""
    if may_use(identity, model, adapter):
        return
    what = f"model {model!r}" if not _matches(identity.models, model) else f"adapter {adapter!r}"
    raise SluiceError(ErrorCode.FORBIDDEN, f"key {identity.name!r} may not use {what}", param="model")


def check_group(identity: Identity, group: RouteGroup | None) -> None:
    """Raise FORBIDDEN where the identity has no access to a group of routes; None is open to every key."""
    if group is not None and group not in identity.groups:
        own = ", ".join(sorted(identity.groups))
        message = f"key {identity.name!r} has no access to the routes of {group}; it has: {own}"
        raise SluiceError(ErrorCode.FORBIDDEN, message)


def check_source(identity: Identity, source: str) -> None:
    """Raise FORBIDDEN for a request from outside the identity's networks."""
    if identity.networks and not is_within(source, identity.networks):
        raise SluiceError(ErrorCode.FORBIDDEN, f"key {identity.name!r} may not be used from {source or 'here'}")


def choose_priority(identity: Identity, priority: int | None) -> int:
    """Return the priority of a request: the one it asks for, or the allowed one next to 0.

    Raises INVALID for one outside the identity's range.
    """
    first, last = identity.priorities
    if priority is None:
        return min(max(0, first), last)
    if not first <= priority <= last:
        message = f"priority must be from {first} to {last} for key {identity.name!r}, got {priority}"
        raise invalid("priority", message)
    return priority


def _matches(globs: tuple[str, ...], name: str) -> bool:
    if globs == ANY:
        return True
    return _matches_any(globs, name) if len(name) <= _MAX_CACHED_CHARS else _matches_any.__wrapped__(globs, name)


@lru_cache(_MAX_CACHED)
def _matches_any(globs: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, each) for each in globs)


@lru_cache(_MAX_CACHED)
def is_within(address: str, networks: Sequence[str]) -> bool:
    """Whether an address belongs to one of the networks; a tuple, since the answers are kept."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in ipaddress.ip_network(each, strict=False) for each in networks)
