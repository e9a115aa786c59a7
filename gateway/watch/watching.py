"""The routes of administrators: what the server does, the last lines of its log, who may use it, and who used it."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.admin import profile, sleep, usage
from sluice.gateway.api.admin import routes as admin
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import openai_error_body
from sluice.gateway.front.http.sse import EventStreamResponse, push_all
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.health import Phase, ServerHealth
from sluice.gateway.server import Server
from sluice.gateway.watch import live_request_routes, timelines
from sluice.gateway.watch.console import routes as console
from sluice.gateway.watch.live.alerts import AlertJudge
from sluice.gateway.watch.live.feeds import LONGEST_S, SHORTEST_S, LiveFeeds, choose_interval
from sluice.gateway.watch.live.sampler import WatchedServer
from sluice.gateway.watch.logs.ring import MAX_LINES, LogLine, LogRing, find_ring, level_number

_NO_STORE = {"cache-control": "no-store"}
_KEEP_ALIVE_S = 20.0
"""Longest silence of a stream, which proxies take for a dead one."""
_LOOK_S = 0.25
"""Seconds between two looks of a stream for lines."""
Level = Literal["debug", "info", "warning", "error", "critical"]


def watching_routers(server: Server, config: ServeConfig) -> list[APIRouter]:
    """Return the routes."""
    access, ledger = server.accounts.calls.access, server.accounts.ledger
    api = APIRouter(tags=["admin"], default_response_class=Response)
    api.get("/v1/admin/logs")(LogRoutes(server.plane.health).read)
    num_workers = config.http.num_workers if config.http.num_workers > 1 else 0
    watched = WatchedServer(server, AlertJudge(server), config.shutdown.heartbeat_timeout_s, num_workers)
    api.get("/v1/admin/live")(LiveRoutes(LiveFeeds(watched)).live)
    return [
        *([console.router()] if config.http.serves_console else ()),
        sleep.router(server.plane),
        admin.tenant_router(access, config.http),
        usage.router(None if ledger is None else ledger.store),
        admin.router(access, config.http),
        live_request_routes.router(server.live),
        api,
        timelines.router(server.timelines),
        profile.router(server.profiler),
    ]


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Chooses lines. A `request_id` of "" chooses all."""

    level: int
    request_id: str
    since: float

    def choose(self, lines: Iterable[LogLine]) -> list[LogLine]:
        return [each for each in lines if self._takes(each)]

    def _takes(self, line: LogLine) -> bool:
        is_of_request = not self.request_id or line.request_id == self.request_id
        return is_of_request and level_number(line.level) >= self.level and line.time >= self.since


class LogRoutes:
    """`GET /v1/admin/logs`: the last lines of the log, and those that come."""

    def __init__(self, health: ServerHealth) -> None:
        self._health = health

    async def read(
        self,
        level: Annotated[Level, Query(description="The lowest level.")] = "debug",
        request_id: Annotated[str, Query(description="Only lines about this request.")] = "",
        since_secs: Annotated[float | None, Query(ge=0, description="Only lines of the last so many seconds.")] = None,
        limit: Annotated[int, Query(ge=0, le=MAX_LINES, description="Most lines of those that there are.")] = 500,
        follow: Annotated[bool, Query(description="A stream, which goes on with lines that come.")] = False,
    ) -> Response:
        """Return the last lines of the log, the oldest first. The server keeps 2,000."""
        ring = find_ring()
        if ring is None:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, "this process keeps no lines of its log")
        since = 0.0 if since_secs is None else time() - since_secs
        chosen = LineFilter(level_number(level.upper()), request_id, since)
        if follow:
            frames = partial(push_all, self._follow(ring, chosen, limit))
            return EventStreamResponse(frames, _encode_error, _NO_STORE, keep_alive_s=_KEEP_ALIVE_S)
        lines = _last(chosen.choose(ring.since(0)[1]), limit)
        data = [msgspec.to_builtins(each) for each in lines]
        return json_response({"object": "list", "data": data}, 200, _NO_STORE)

    async def _follow(self, ring: LogRing, chosen: LineFilter, limit: int) -> AsyncGenerator[bytes, None]:
        """Yield the present lines, then new ones, until the server drains."""
        yield b": lines of the log\n\n"
        count, kept = ring.since(0)
        lines = _last(chosen.choose(kept), limit)
        while True:
            if lines:
                yield b"".join(b"event: line\ndata: %b\n\n" % msgspec.json.encode(each) for each in lines)
            if self._health.phase is Phase.DRAINING:
                return
            await asyncio.sleep(_LOOK_S)
            count, new = ring.since(count)
            lines = chosen.choose(new)


def _last(lines: list[LogLine], limit: int) -> list[LogLine]:
    return lines[max(0, len(lines) - limit) :]


class LiveRoutes:
    """`GET /v1/admin/live`: a sample of what the server does, or a stream of samples."""

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
        frames = partial(push_all, self._frames(interval_s))
        return EventStreamResponse(frames, _encode_error, _NO_STORE, keep_alive_s=_KEEP_ALIVE_S)

    async def _frames(self, interval_s: float) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._feeds.listen(interval_s)) as samples:
            async for number, sample in samples:
                yield b"event: sample\nid: %d\ndata: %b\n\n" % (number, sample)


def _encode_error(error: SluiceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % openai_error_body(error)
