"""`GET /v1/usage` and `/v1/usage/requests`: what keys, tenants and models used, by the ledger."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response
from starlette.responses import StreamingResponse

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import current_identity
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.tenancy.access.identity import ANY_TENANT, RouteGroup
from sluice.gateway.tenancy.ledger.rows import LedgerRow
from sluice.gateway.tenancy.ledger.store import LedgerStore, UsageQuery, describe_usage, parse_query

_START = Annotated[str, Query(description="First day, by UTC: 2026-11-01. Default: 30 days in all.")]
_END = Annotated[str, Query(description="Last day, which is included. Default: today.")]


def router(ledger: LedgerStore | None) -> APIRouter:
    """Return the routes over the ledger. A key of the group admin sees all, another one its own tenant."""
    routes = UsageRoutes(ledger)
    api = APIRouter(tags=["admin"], default_response_class=Response)
    api.get("/v1/usage")(routes.usage)
    api.get("/v1/usage/requests")(routes.requests)
    return api


class UsageRoutes:
    """Handlers of the routes."""

    def __init__(self, ledger: LedgerStore | None) -> None:
        self._ledger = ledger

    def _store(self) -> LedgerStore:
        """Return the ledger's store. Raises UNIMPLEMENTED where there is none."""
        if self._ledger is None:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, "this server keeps no ledger (--ledger none)")
        return self._ledger

    async def usage(
        self,
        start: _START = "",
        end: _END = "",
        group_by: Annotated[
            list[str] | None, Query(description="Any of day, key, tenant, model, adapter. Default: day.")
        ] = None,
    ) -> Response:
        """Sum up requests, tokens and prices."""
        query = parse_query(start, end, ["day"] if group_by is None else group_by)
        return json_response(await describe_usage(self._store(), _restrict(query)))

    async def requests(self, start: _START = "", end: _END = "") -> Response:
        """Return the ledger's row of each request, as lines of JSON."""
        pages = _dump_pages(self._store(), _restrict(parse_query(start, end, [])))
        first = await anext(pages, b"")  # an error now is an answer of its own
        return StreamingResponse(_continue(first, pages), media_type="application/jsonl")


def _restrict(query: UsageQuery) -> UsageQuery:
    """Return the part of a query that its sender may see."""
    identity = current_identity()
    if identity is None or RouteGroup.ADMIN in identity.groups:
        return query
    if identity.tenant and identity.tenant != ANY_TENANT:
        return query._replace(tenant=identity.tenant)
    return query._replace(key_id=identity.key_id)


async def _dump_pages(store: LedgerStore, query: UsageQuery) -> AsyncGenerator[bytes, None]:
    async for page in store.read_rows(query):
        yield await asyncio.to_thread(_dump_page, page)


def _dump_page(page: Sequence[LedgerRow]) -> bytes:
    return b"".join(orjson.dumps(row._asdict(), option=orjson.OPT_APPEND_NEWLINE) for row in page)


async def _continue(first: bytes, pages: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for page in pages:
        yield page
