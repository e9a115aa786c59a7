"""API keys: how they are made, what is stored of them, and what may be asked of a new one."""

import hmac
import ipaddress
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from time import time
from typing import Any, NamedTuple

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.tenancy.access.identity import (
    ANY_TENANT,
    NEW_KEY_GROUPS,
    PRIORITIES,
    UNNAMED_GROUPS,
    Identity,
    QuotaLimits,
    RouteGroup,
)

PREFIX = "sk-sluice-"
"""By which scanners of code and logs recognise a key."""
_ID_BYTES = 6
_SECRET_BYTES = 32
MAX_NAME_CHARS = 128
_MAX_WEIGHT = 1e6
_MAX_ITEMS = 64
_MAX_TEXT_CHARS = 512


class StoredKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key at rest: its identity and the digest of its secret, in hexadecimal; times are in seconds since 1970.

    A revoked key stays, so that a server whose keys are all revoked goes on to ask for one.
    """

    identity: Identity
    digest: str
    created_at: float
    rotated_at: float | None = None
    revoked_at: float | None = None
    previous_digest: str = ""
    """The digest before the last rotation, which counts until `previous_until`."""
    previous_until: float = 0.0

    @property
    def id(self) -> str:
        return self.identity.key_id

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def is_active(self) -> bool:
        """Whether the key is not revoked. It may have expired."""
        return self.revoked_at is None

    @property
    def has_unnamed_admin(self) -> bool:
        """Whether the key has the group admin without being told: an older version made it without groups."""
        return self.identity.groups is UNNAMED_GROUPS

    def is_opened_by(self, digest: str, now: float) -> bool:
        """Whether `digest` is that of the key's secret. Takes the same time for any digest."""
        is_current = hmac.compare_digest(digest, self.digest)
        is_previous = hmac.compare_digest(digest, self.previous_digest or self.digest)
        return is_current or (is_previous and now < self.previous_until)


Change = Callable[[StoredKey], StoredKey]
"""Returns a key as it shall be. May raise SluiceError, and is called again where another changes the key meanwhile."""


class NewKey(NamedTuple):
    """A key with its text, which exists nowhere else and is shown once."""

    stored: StoredKey
    text: str


def digest_of(key: str | bytes) -> str:
    """Return what is stored of a key. Its 256 random bits need no slow hash."""
    return sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


def find_key_id(key: bytes) -> str | None:
    """Return the public id in a key's text; None for text of another form."""
    if not key.startswith(PREFIX.encode()):
        return None
    key_id, dash, _ = key[len(PREFIX) :].partition(b"-")
    return key_id.decode("ascii", "replace") if dash else None


def make_key(identity: Identity) -> NewKey:
    """Make a key with the rights of `identity`, whose id is chosen here; without groups it has NEW_KEY_GROUPS.

    Raises as `check_identity`.
    """
    check_identity(identity)
    groups = NEW_KEY_GROUPS if identity.groups is UNNAMED_GROUPS else identity.groups
    identity = msgspec.structs.replace(identity, key_id=secrets.token_hex(_ID_BYTES), groups=groups)
    text = _make_text(identity.key_id)
    return NewKey(StoredKey(identity=identity, digest=digest_of(text), created_at=time()), text)


def rotate_key(key: StoredKey, grace_s: float) -> NewKey:
    """Make a new text for a key. The one before it counts for another `grace_s` seconds."""
    now, text = time(), _make_text(key.id)
    rotated = msgspec.structs.replace(
        key, digest=digest_of(text), rotated_at=now, previous_digest=key.digest, previous_until=now + grace_s
    )
    return NewKey(rotated, text)


_FIXED = ("key_id", "name", "is_foreign")
"""Fields of an identity that stay as they are."""


def update_key(key: StoredKey, changes: Mapping[str, Any]) -> StoredKey:
    """Return the key with other rights. What `changes` does not name stays, also among `limits`; None removes a limit
    or a restriction, and gives a key the groups of a new one. Raises INVALID for a field that no key has, that cannot
    change, or that cannot have the value."""
    for field in changes:
        if field in _FIXED:
            raise invalid(field, f"{field} cannot change; make another key")
        if field not in Identity.__struct_fields__:
            raise invalid(field, f"no key has {field[:60]!r}; there are {', '.join(Identity.__struct_fields__)}")
    changes = dict(changes)
    limits = changes.get("limits", {})
    if isinstance(limits, Mapping):
        changes["limits"] = _given({**msgspec.to_builtins(key.identity.limits), **limits})
    if changes.get("groups", ()) is None:
        changes["groups"] = list(NEW_KEY_GROUPS)
    read = parse_fields({"name": key.name, **_given(changes)})
    values = {field: getattr(read, field) for field in changes}
    identity = msgspec.structs.replace(key.identity, **values)
    check_identity(identity)
    return msgspec.structs.replace(key, identity=identity)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def revoke_key(key: StoredKey) -> StoredKey:
    """Return the key as revoked, which nothing opens."""
    return msgspec.structs.replace(key, revoked_at=time(), previous_digest="", previous_until=0.0)


def _make_text(key_id: str) -> str:
    return f"{PREFIX}{key_id}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def find_key(keys: Iterable[StoredKey], name: str) -> StoredKey:
    """Return the key with that name or id that is not revoked. Raises NOT_FOUND."""
    for each in keys:
        if each.is_active and name in (each.name, each.id):
            return each
    raise SluiceError(ErrorCode.NOT_FOUND, f"no key {name[:100]!r}: none has that name or id, or it is revoked")


def refuse_taken_name(keys: Iterable[StoredKey], name: str) -> None:
    """Raise ALREADY_EXISTS where a key that is not revoked has the name."""
    if any(each.is_active and each.name == name for each in keys):
        message = f"a key named {name!r} exists; rotate it, or revoke it first"
        raise SluiceError(ErrorCode.ALREADY_EXISTS, message, param="name")


def decode_keys(records: Iterable[bytes]) -> list[StoredKey]:
    """Decode keys, and return them the oldest first."""
    decode = msgspec.json.Decoder(StoredKey).decode
    return sorted(map(decode, records), key=lambda each: each.created_at)


def describe_key(key: StoredKey) -> dict[str, Any]:
    """Return what may be shown of a key, as JSON has it."""
    fields = {name: value for name, value in msgspec.structs.asdict(key.identity).items() if name not in _FIXED}
    fields["groups"] = sorted(fields["groups"])
    fields["limits"] = msgspec.to_builtins(key.identity.limits)
    is_expired = key.identity.expires_at is not None and time() >= key.identity.expires_at
    state = "revoked" if not key.is_active else "expired" if is_expired else "active"
    times = {name: getattr(key, name) for name in ("created_at", "rotated_at", "revoked_at")}
    return {"object": "key", "id": key.id, "name": key.name, "state": state, **fields, **times}


def check_identity(identity: Identity) -> None:
    """Raise INVALID for a value that no key can have, naming its field."""
    _check_text("name", identity.name, 1)
    if identity.tenant != ANY_TENANT:
        _check_text("tenant", identity.tenant, 0)
    if identity.is_foreign:
        raise invalid("is_foreign", "is_foreign belongs to tokens of other issuers; leave it out")
    _check_text("subject", identity.subject, 0)
    weight = identity.weight
    if weight is not None and not 0 < weight <= _MAX_WEIGHT:
        raise invalid("weight", f"weight must be above 0 and at most {_MAX_WEIGHT:g}, got {weight:g}")
    first, last = identity.priorities
    if not PRIORITIES[0] <= first <= last <= PRIORITIES[1]:
        raise invalid(
            "priorities", f"priorities must be two 32-bit integers, the lower one first, got {first} to {last}"
        )
    if not identity.groups:
        raise invalid("groups", "groups must name at least one group of routes, got none")
    for field in ("models", "adapters", "networks"):
        items = getattr(identity, field)
        if len(items) > _MAX_ITEMS or not all(
            0 < len(each) <= _MAX_TEXT_CHARS and each.isprintable() for each in items
        ):
            raise invalid(field, f"{field} must be at most {_MAX_ITEMS} printable texts that are not empty")
    for network in identity.networks:
        _parse_network(network)
    _check_metadata(identity.metadata)
    _check_limits(identity.limits)


def _check_text(field: str, value: str, least: int) -> None:
    if not least <= len(value) <= MAX_NAME_CHARS or not value.isprintable() or value != value.strip():
        raise invalid(field, f"{field} must have {least} to {MAX_NAME_CHARS} printable characters, got {value[:40]!r}")


def _parse_network(text: str) -> None:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise invalid("networks", f"networks must be of the form 10.0.0.0/8 or fd00::/8, got {text[:60]!r}") from None


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_ITEMS or any(max(len(k), len(v)) > _MAX_TEXT_CHARS for k, v in metadata.items()):
        message = f"metadata must have at most {_MAX_ITEMS} pairs of texts of at most {_MAX_TEXT_CHARS} characters"
        raise invalid("metadata", message)


class _Limited(msgspec.Struct, forbid_unknown_fields=True):
    limits: QuotaLimits


def check_tenant_name(name: str) -> None:
    """Raise INVALID for what is no name of a tenant."""
    if name == ANY_TENANT:
        raise invalid("tenant", f"tenant must be one tenant, got {name!r}")
    _check_text("tenant", name, 1)


def parse_limits(fields: object, *, is_text: bool = False) -> QuotaLimits:
    """Read an object with the field `limits`, whose numbers may be text. Raises INVALID, naming the field."""
    try:
        limits = msgspec.convert(fields, _Limited, strict=not is_text).limits
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from None
    _check_limits(limits)
    return limits


def _check_limits(limits: QuotaLimits) -> None:
    for field, value in msgspec.structs.asdict(limits).items():
        if value is not None and not 0 <= value < math.inf:
            raise invalid(f"limits.{field}", f"limits.{field} must be a number of at least 0, got {value}")


def parse_fields(fields: object) -> Identity:
    """Read the fields of a new key, which has no id yet. Raises INVALID, naming the field."""
    try:
        identity = msgspec.convert(fields, Identity, strict=True)
    except msgspec.ValidationError as error:
        raise _as_invalid(error) from None
    check_identity(identity)
    return identity


def _as_invalid(error: msgspec.ValidationError) -> SluiceError:
    what, _, place = str(error).partition(" - at `$")
    field = place.strip("`.").split("[")[0] or "body"
    allowed = f"; groups are {', '.join(RouteGroup)}" if field == "groups" else ""
    return invalid(field, f"{field}: {what[0].lower()}{what[1:]}{allowed}")
