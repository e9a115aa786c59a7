"""The sender of a request and its rights: the same for an API key, a token of another issuer and a TLS certificate."""

from enum import StrEnum

import msgspec

ANY = ("*",)
ANY_TENANT = "*"
"""The tenant of a key that names a tenant with each request, in a header: of a proxy that knows its clients."""
PRIORITIES = (-(2**31), 2**31 - 1)
"""First and last priority that a request can have; lower runs earlier."""


class RouteGroup(StrEnum):
    """A part of the routes and RPCs, to which a key has access or has not."""

    INFERENCE = "inference"
    EMBEDDINGS = "embeddings"
    RAG = "rag"
    REPOSITORY = "repository"
    ADMIN = "admin"
    METRICS = "metrics"


NEW_KEY_GROUPS = frozenset({RouteGroup.INFERENCE, RouteGroup.EMBEDDINGS, RouteGroup.RAG})
"""Groups of a key or a token for which nobody names any: not the server's administration."""
UNNAMED_GROUPS = frozenset(RouteGroup)
"""All groups: those of a stored key without any, which an older version made. A new key has its groups written."""


class QuotaLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most that a key may use; None is no limit. A cached prompt token counts as `cached_token_rate` tokens."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    money_per_month: float | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    cached_token_rate: float = 1.0


NO_LIMITS = QuotaLimits()


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The sender of a request and its rights. It has no secret, so it may be logged and stored.

    `key_id` is public, and stays when a key is rotated. `models` and `adapters` are globs; `priorities` are the first
    and the last that requests may have; `networks` are those that requests may come from, none for all; `weight` is the
    tenant's share of the engine, None for the engine's default; `expires_at` is in seconds since 1970; `subject` is
    the common name in client certificates that stand for the key. The answers of one that `caches` are kept for equal
    requests of its tenant. One that `is_foreign` has a token of another issuer.
    """

    name: str
    key_id: str = ""
    tenant: str = ""
    weight: float | None = None
    priorities: tuple[int, int] = PRIORITIES
    expires_at: float | None = None
    models: tuple[str, ...] = ANY
    adapters: tuple[str, ...] = ANY
    groups: frozenset[RouteGroup] = UNNAMED_GROUPS
    networks: tuple[str, ...] = ()
    limits: QuotaLimits = NO_LIMITS
    subject: str = ""
    caches: bool = False
    is_foreign: bool = False
    metadata: dict[str, str] = {}
