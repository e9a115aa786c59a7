"""`GET /v1/requests` and `/v1/requests/{id}/timeline`: where the time of the last requests went."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import current_identity
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.tenancy.access.identity import RouteGroup
from sluice.record.timelines import TimelineOwner, Timelines, TimelineSummary

_NO_STORE = {"cache-control": "no-store"}
_MOST = 10_000


def router(timelines: Timelines) -> APIRouter:
    """Return the routes over the timelines. A key of the group admin sees all, another one its own requests."""
    routes = TimelineRoutes(timelines)
    api = APIRouter(prefix="/v1/requests", tags=["admin"], default_response_class=Response)
    api.get("")(routes.list)
    api.get("/{id}/timeline")(routes.timeline)
    return api


class TimelineRoutes:
    """Handlers of the routes."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines

    async def list(
        self,
        model: Annotated[str, Query(description="Only those of this model.")] = "",
        limit: Annotated[int, Query(ge=1, le=_MOST, description="Most that are listed.")] = 100,
    ) -> Response:
        """List the last requests to language models, the newest first."""
        self._refuse_if_none()
        found = [each for each in await self._timelines.find("", _owner()) if not model or each.model == model]
        found.sort(key=lambda each: -each.started_at)
        names = TimelineSummary.__struct_fields__
        data = [{name: getattr(each, name) for name in names} for each in found[:limit]]
        return json_response({"object": "list", "data": data, "total": len(found)}, 200, _NO_STORE)

    async def timeline(self, id: str) -> Response:
        """Return the phases of one request, as bars of a waterfall. `id` is its `x-request-id`."""
        self._refuse_if_none()
        found = await self._timelines.find(id, _owner())
        if not found:
            message = (
                f"no timeline of a request {id[:80]!r} is kept: only the last requests to language models have one "
                "(--timeline-requests); the id is the answer's x-request-id, and GET /v1/requests lists them"
            )
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="id")
        return json_response(msgspec.to_builtins(max(found, key=lambda each: each.started_at)), 200, _NO_STORE)

    def _refuse_if_none(self) -> None:
        if self._timelines.ring is None:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, "this server keeps no timelines (--timeline-requests 0)")


def _owner() -> TimelineOwner | None:
    """Return the owners whose requests this sender may see; None for all."""
    identity = current_identity()
    if identity is None or RouteGroup.ADMIN in identity.groups:
        return None
    return TimelineOwner(identity.key_id, identity.name)
