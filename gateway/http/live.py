"""`GET /v1/admin/live`: what the server does at this moment, once or as a stream of samples."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query, Response

from sluice.errors import SluiceError
from sluice.gateway.http.errors import openai_error_body
from sluice.gateway.http.sse import EventStreamResponse
from sluice.gateway.live.feeds import LONGEST_S, SHORTEST_S, LiveFeeds, choose_interval

_NO_STORE = {"cache-control": "no-store"}
_KEEP_ALIVE_S = 20.0
"""Longest silence of a stream, which proxies take for a dead one."""


def router(feeds: LiveFeeds) -> APIRouter:
    """Return the route over the samples of `feeds`."""
    routes = LiveRoutes(feeds)
    api = APIRouter(tags=["admin"], default_response_class=Response)
    api.get("/v1/admin/live")(routes.live)
    return api


class LiveRoutes:
    """Handlers of the routes."""

    def __init__(self, feeds: LiveFeeds) -> None:
        self._feeds = feeds

    async def live(
        self,
        interval_secs: Annotated[
            float, Query(ge=SHORTEST_S, le=LONGEST_S, description="Seconds from one sample to the next.")
        ] = 1.0,
        once: Annotated[bool, Query(description="One JSON object instead of a stream.")] = False,
    ) -> Response:
        """Stream what the server does: tokens, latencies, engines, sequences, models, tenants (docs/live.md)."""
        interval_s = choose_interval(interval_secs)
        if once:
            sample = await self._feeds.sample_once(interval_s)
            return Response(sample, headers=_NO_STORE, media_type="application/json")
        return EventStreamResponse(self._frames(interval_s), _encode_error, _NO_STORE, keep_alive_s=_KEEP_ALIVE_S)

    async def _frames(self, interval_s: float) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._feeds.listen(interval_s)) as samples:
            async for number, sample in samples:
                yield b"event: sample\nid: %d\ndata: %b\n\n" % (number, sample)


def _encode_error(error: SluiceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % openai_error_body(error)
