"""GET /health: one probe for supervisors that know neither protocol."""

import orjson
from fastapi import APIRouter, Response

from gateway.service import InferenceService


def router(service: InferenceService) -> APIRouter:
    """200 while a new request would be served; else 503 and the reason."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        readiness = service.readiness()
        if readiness.is_ok:
            return Response(b'{"status":"ok"}', media_type="application/json")
        body = orjson.dumps({"status": "unavailable", "reason": readiness.reason})
        return Response(body, 503, media_type="application/json")

    return routes
