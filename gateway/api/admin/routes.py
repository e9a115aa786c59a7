"""`/v1/admin`: API keys and the limits of tenants, as `sluice keys` and `sluice tenants` change them."""

import logging
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import current_identity
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import RequestObject, read_body
from sluice.gateway.options.http import HttpOptions
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.grants import check_change, check_grant, check_limits
from sluice.gateway.tenancy.access.identity import ANY_TENANT, Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.access.keys import (
    StoredKey,
    check_tenant_name,
    describe_key,
    find_key,
    make_key,
    parse_fields,
    parse_limits,
    revoke_key,
    rotate_key,
    update_key,
)
from sluice.gateway.tenancy.access.store import KeyStore

log = logging.getLogger(__name__)

_DAY_S = 86_400.0
_MAX_GRACE_S = 365 * _DAY_S


class CreateKeyRequest(RequestObject):
    """`POST /v1/admin/keys`. What is left out is not limited."""

    example = '{"name": "ci", "tenant": "research", "models": ["rill*"], "limits": {"requests_per_minute": 60}}'
    name: str = Field(description="By which it is listed; no two keys share one.")
    tenant: str = Field("", description="Whose tokens its requests use; * lets them say, in x-sluice-tenant.")
    weight: float | None = Field(None, description="The tenant's share of an engine.")
    priorities: list[int] | None = Field(
        None, min_length=2, max_length=2, description="First and last priority of its requests."
    )
    expires_at: float | None = Field(None, description="When it ends, in seconds since 1970.")
    models: list[str] | None = Field(None, description="Globs of the models that it may use.")
    adapters: list[str] | None = Field(None, description="Globs of the LoRA adapters that it may use.")
    groups: list[str] | None = Field(
        None,
        description="inference, embeddings, rag, repository, admin, metrics. Default: the first three. Only admin "
        "makes and changes keys.",
    )
    networks: list[str] | None = Field(None, description="Where its requests may come from.")
    limits: dict[str, int | float] | None = Field(None, description="Limits of use, such as requests_per_minute.")
    subject: str = Field("", description="Common name of client certificates that stand for it.")
    caches: bool = Field(False, description="Whether its answers are kept for equal requests of its tenant.")
    metadata: dict[str, str] | None = Field(None, description="Notes.")


class UpdateKeyRequest(RequestObject):
    """`PATCH /v1/admin/keys/NAME`. What is left out stays; null removes a limit or a restriction."""

    example = '{"models": ["rill*"], "limits": {"requests_per_minute": 120, "tokens_per_day": null}}'
    tenant: str | None = Field(None, description="Whose tokens its requests use.")
    weight: float | None = Field(None, description="The tenant's share of an engine.")
    priorities: list[int] | None = Field(None, description="First and last priority of its requests.")
    expires_at: float | None = Field(None, description="When it ends, in seconds since 1970.")
    models: list[str] | None = Field(None, description="Globs of the models that it may use.")
    adapters: list[str] | None = Field(None, description="Globs of the LoRA adapters that it may use.")
    groups: list[str] | None = Field(None, description="Groups of routes that it may use.")
    networks: list[str] | None = Field(None, description="Where its requests may come from.")
    limits: dict[str, int | float | None] = Field({}, description="Limits to change.")
    subject: str | None = Field(None, description="Common name of client certificates that stand for it.")
    caches: bool | None = Field(None, description="Whether its answers are kept for equal requests of its tenant.")
    metadata: dict[str, str] | None = Field(None, description="Notes.")


class TenantRequest(RequestObject):
    """`PUT /v1/admin/tenants/NAME`. What is left out is not limited."""

    example = '{"limits": {"tokens_per_day": 5000000}}'
    limits: dict[str, int | float] = Field(description="Limits of all keys of the tenant together.")


def router(access: AccessControl, options: HttpOptions) -> APIRouter:
    """Return the routes, which change the keys of `access`."""
    routes = KeyRoutes(access, options)
    api = APIRouter(prefix="/v1/admin/keys", tags=["admin"], default_response_class=Response)
    api.post("", openapi_extra=describe_body(CreateKeyRequest, ()))(routes.create)
    api.get("")(routes.list)
    api.get("/{name}")(routes.show)
    api.patch("/{name}", openapi_extra=describe_body(UpdateKeyRequest, ()))(routes.update)
    api.delete("/{name}")(routes.revoke)
    api.post("/{name}/rotate")(routes.rotate)
    return api


def tenant_router(access: AccessControl, options: HttpOptions) -> APIRouter:
    """Return the routes of the limits of tenants."""
    routes = TenantRoutes(access, options)
    api = APIRouter(prefix="/v1/admin/tenants", tags=["admin"], default_response_class=Response)
    api.get("")(routes.list)
    api.put("/{name}", openapi_extra=describe_body(TenantRequest, ()))(routes.set)
    return api


class _StoreRoutes:
    """State that the handlers of the routes share."""

    def __init__(self, access: AccessControl, options: HttpOptions) -> None:
        self._access = access
        self._options = options

    def _store(self) -> KeyStore:
        """Return the store. Raises FORBIDDEN while nobody is asked for a key: whoever came first would own it."""
        store = self._access.ring.store
        if store is None:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, "this server has no store of keys (--keys-store none)")
        if not self._access.is_enforced:
            message = "the first key is made on the server's own machine: sluice keys create --name boss --groups admin"
            raise SluiceError(ErrorCode.FORBIDDEN, message)
        return store


class TenantRoutes(_StoreRoutes):
    """Handlers of the routes of tenants."""

    async def list(self, request: Request) -> Response:
        """List the tenants that have limits."""
        tenants = await self._store().load_tenants()
        return json_response({"object": "list", "data": [_describe(*each) for each in tenants.items()]})

    async def set(self, request: Request, name: str) -> Response:
        """Set the limits of a tenant, in the place of those before; none remove them."""
        store = self._store()
        fields, _ = await read_body(request, TenantRequest, self._options)
        check_tenant_name(name)
        limits = parse_limits(fields.model_dump())
        _check_own_tenant(name, self._access.ring.tenants.get(name), limits)
        await store.set_tenant(name, limits)
        await self._access.ring.refresh()
        return json_response(_describe(name, limits))


def _check_own_tenant(name: str, before: QuotaLimits | None, limits: QuotaLimits) -> None:
    """Raise FORBIDDEN where a key would loosen the limits of its own tenant, to which its requests are held."""
    giver = current_identity()
    if giver is not None and before is not None and giver.tenant != ANY_TENANT and name == (giver.tenant or giver.name):
        check_limits(giver, before, limits)


def _describe(name: str, limits: QuotaLimits) -> dict[str, Any]:
    return {"object": "tenant", "name": name, "limits": msgspec.to_builtins(limits)}


class KeyRoutes(_StoreRoutes):
    """Handlers of the routes of keys. `name` may also be a key's id. Nobody gives a right that his own key lacks."""

    async def create(self, request: Request) -> Response:
        """Make a key. Its text is in this answer alone."""
        store = self._store()
        fields, _ = await read_body(request, CreateKeyRequest, self._options)
        new = make_key(parse_fields(fields.model_dump(exclude_none=True)))
        check_grant(current_identity(), new.stored.identity)
        await store.add(new.stored)
        _note_admin(None, new.stored.identity)
        return await self._answer(new.stored, {"key": new.text}, 201)

    async def list(self, request: Request, revoked: Annotated[bool, Query()] = False) -> Response:
        """List the keys, the oldest first; with `revoked`, those too."""
        keys = [describe_key(each) for each in await self._store().load() if revoked or each.is_active]
        return json_response({"object": "list", "data": keys})

    async def show(self, request: Request, name: str) -> Response:
        """Describe a key."""
        return json_response(describe_key(find_key(await self._store().load(), name)))

    async def rotate(
        self, request: Request, name: str, grace_s: Annotated[float, Query(ge=0, le=_MAX_GRACE_S)] = _DAY_S
    ) -> Response:
        """Make a new text for a key, whose rights and things stay. The old text works for another `grace_s` seconds."""
        store = self._store()
        texts: list[str] = []

        giver = current_identity()

        def rotate(key: StoredKey) -> StoredKey:
            if giver is None or giver.key_id != key.id:
                check_grant(giver, key.identity)  # whoever has the text has the rights
            new = rotate_key(key, grace_s)
            texts.append(new.text)
            return new.stored

        return await self._answer(await store.change(name, rotate), {"key": texts[-1]})

    async def update(self, request: Request, name: str) -> Response:
        """Change a key's rights. Its text and its things stay."""
        store = self._store()
        fields, _ = await read_body(request, UpdateKeyRequest, self._options)
        changes, giver = fields.model_dump(exclude_unset=True), current_identity()
        replaced: list[StoredKey] = []

        def change(key: StoredKey) -> StoredKey:
            replaced.append(key)
            return check_change(giver, key, update_key(key, changes))

        stored = await store.change(name, change)
        _note_admin(replaced[-1].identity, stored.identity)
        return await self._answer(stored, {})

    async def revoke(self, request: Request, name: str) -> Response:
        """End a key."""
        return await self._answer(await self._store().change(name, revoke_key), {})

    async def _answer(self, key: StoredKey, more: dict[str, str], status: int = 200) -> Response:
        await self._access.ring.refresh()
        return json_response({**more, **describe_key(key)}, status, {"cache-control": "no-store"})


def _note_admin(before: Identity | None, after: Identity) -> None:
    """Say in the log that a key has become an administrator's."""
    had = before is not None and RouteGroup.ADMIN in before.groups
    if RouteGroup.ADMIN in after.groups and not had:
        giver = current_identity()
        by = "nobody who was asked for a key" if giver is None else f"key {giver.name!r}"
        log.warning("key %r has admin rights: it makes and changes keys. They were given by %s", after.name, by)
