"""`/v1/admin/requests`: the open generations of language models, and the end of one."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.plane.live_requests import LiveRequests

_MOST = 10_000
_NO_STORE = {"cache-control": "no-store"}


def router(live: LiveRequests) -> APIRouter:
    """Return the routes over the open generations of `live`."""
    routes = LiveRequestRoutes(live)
    api = APIRouter(prefix="/v1/admin/requests", tags=["admin"], default_response_class=Response)
    api.get("")(routes.list)
    api.post("/{id}/cancel")(routes.cancel)
    return api


class LiveRequestRoutes:
    """Handlers of the routes."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live

    async def list(
        self,
        model: Annotated[str, Query(description="Only those of this model.")] = "",
        tenant: Annotated[str | None, Query(description="Only those of this tenant.")] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST, description="Most that are listed.")] = 1000,
    ) -> Response:
        """List the open generations, the oldest first. `total` counts those that the limit leaves out too."""
        found = [
            each
            for each in await self._live.list_all()
            if (not model or each.model == model) and (tenant is None or each.tenant == tenant)
        ]
        data = [msgspec.to_builtins(each) for each in found[:limit]]
        return json_response({"object": "list", "data": data, "total": len(found)}, 200, _NO_STORE)

    async def cancel(self, id: str) -> Response:
        """End a generation, or all of a request id. Its client gets an error of the code `cancelled`."""
        num_cancelled = await self._live.cancel(id)
        if num_cancelled == 0:
            message = f"no open request has the id {id[:80]!r}: it may have ended; GET /v1/admin/requests lists them"
            raise SluiceError(ErrorCode.NOT_FOUND, message, param="id")
        return json_response({"object": "request.cancelled", "id": id, "num_cancelled": num_cancelled}, 200, _NO_STORE)
