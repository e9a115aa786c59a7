"""Checks that a key gives another no right that it lacks itself."""

import ipaddress
from fnmatch import fnmatchcase
from typing import NoReturn

import msgspec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.identity import ANY, ANY_TENANT, Identity, QuotaLimits
from sluice.gateway.tenancy.access.keys import StoredKey

_LEAST_ALLOWS_MOST = ("cached_token_rate",)
"""Fields of limits of which a smaller value allows more; of all others a greater one does."""


def check_grant(giver: Identity | None, made: Identity) -> None:
    """Raise FORBIDDEN, naming the field, where a new key would have a right that its maker lacks.

    `giver` None: nobody was asked for a key.
    """
    if giver is None:
        return
    if not made.groups <= giver.groups:
        _refuse(giver, "groups", ", ".join(sorted(made.groups - giver.groups)), ", ".join(sorted(giver.groups)))
    for field in ("models", "adapters"):
        own, given = getattr(giver, field), getattr(made, field)
        if wider := [glob for glob in given if not _is_covered(glob, own)]:
            _refuse(giver, field, ", ".join(wider), ", ".join(own) or "none")
    if giver.tenant != ANY_TENANT and made.tenant != giver.tenant and (giver.tenant or made.tenant == ANY_TENANT):
        _refuse(giver, "tenant", made.tenant or made.name, giver.tenant or "its own")
    if not giver.priorities[0] <= made.priorities[0] <= made.priorities[1] <= giver.priorities[1]:
        _refuse(giver, "priorities", _range(made.priorities), _range(giver.priorities))
    if giver.networks and not (made.networks and all(_is_inside(each, giver.networks) for each in made.networks)):
        _refuse(giver, "networks", ", ".join(made.networks) or "anywhere", ", ".join(giver.networks))
    if giver.expires_at is not None and (made.expires_at is None or made.expires_at > giver.expires_at):
        _refuse(giver, "expires_at", _time(made.expires_at), _time(giver.expires_at))
    check_limits(giver, giver.limits, made.limits)


def check_change(giver: Identity | None, before: StoredKey, after: StoredKey) -> StoredKey:
    """Return a key as it shall be. Raises as `check_grant` for a right that it did not have before."""
    if giver is not None:
        changed = {
            field: getattr(after.identity, field)
            for field in Identity.__struct_fields__
            if getattr(after.identity, field) != getattr(before.identity, field)
        }
        check_grant(giver, msgspec.structs.replace(giver, **changed))
    return after


def check_limits(giver: Identity, own: QuotaLimits, given: QuotaLimits) -> None:
    """Raise FORBIDDEN where limits allow more than those that the giver is held to."""
    for field in QuotaLimits.__struct_fields__:
        most, wanted = getattr(own, field), getattr(given, field)
        if most is None or wanted == most:
            continue
        allows_more = wanted is None or (wanted < most if field in _LEAST_ALLOWS_MOST else wanted > most)
        if allows_more:
            _refuse(giver, f"limits.{field}", "no limit" if wanted is None else f"{wanted:g}", f"{most:g}")


def _refuse(giver: Identity, field: str, wanted: str, own: str) -> NoReturn:
    message = f"{field}: key {giver.name!r} cannot give what it does not have: {wanted}; it has {own}"
    raise SluiceError(ErrorCode.FORBIDDEN, message, param=field)


def _is_covered(glob: str, own: tuple[str, ...]) -> bool:
    """Whether all that `glob` matches is matched by one of `own`, as far as their text shows it.

    A `*` of ours matches what stands for anything in the other glob, but `?` and sets must be the same in both.
    """
    if own == ANY or glob in own:
        return True
    if "[" in glob:
        return False
    has_wildcards = "*" in glob or "?" in glob
    return any(fnmatchcase(glob, each) for each in own if not has_wildcards or not set("?[") & set(each))


def _is_inside(network: str, own: tuple[str, ...]) -> bool:
    found = ipaddress.ip_network(network, strict=False)
    return any(found.version == each.version and found.subnet_of(each) for each in map(_network, own))  # type: ignore[arg-type]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


def _range(priorities: tuple[int, int]) -> str:
    return f"{priorities[0]} to {priorities[1]}"


def _time(seconds: float | None) -> str:
    return "for ever" if seconds is None else f"until {seconds:.0f}"
