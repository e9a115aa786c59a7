"""`POST /v1/admin/profile`: records what engines and the event loop do, for Perfetto."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.plane.profiler import Profiler

_MOST_S = 60.0


def router(profiler: Profiler) -> APIRouter:
    """Return the route over the profiler of a server."""
    api = APIRouter(prefix="/v1/admin/profile", tags=["admin"], default_response_class=Response)

    async def record(
        seconds: Annotated[float, Query(gt=0, le=_MOST_S, description="How long to record.")] = 10.0,
    ) -> Response:
        """Record engine steps, tasks and requests, and return them as Chrome's and Perfetto's trace events."""
        return json_response(await profiler.record(seconds), 200, {"cache-control": "no-store"})

    api.post("")(record)
    return api
