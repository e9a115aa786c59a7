"""`GET /v1/admin/logs`: the last lines of the log, and those that come."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from time import time
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.health import Phase
from sluice.gateway.http.bodies import json_response
from sluice.gateway.http.errors import openai_error_body
from sluice.gateway.http.sse import EventStreamResponse
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.log_ring import MAX_LINES, LogLine, LogRing, find_ring, level_number

_NO_STORE = {"cache-control": "no-store"}
_KEEP_ALIVE_S = 20.0
_LOOK_S = 0.25
"""How often a stream looks for lines."""
Level = Literal["debug", "info", "warning", "error", "critical"]


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


def router(service: InferenceService) -> APIRouter:
    """Return the route over the lines that this process has logged."""
    routes = LogRoutes(service)
    api = APIRouter(tags=["admin"], default_response_class=Response)
    api.get("/v1/admin/logs")(routes.read)
    return api


class LogRoutes:
    """Handlers of the routes."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

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
            frames = self._follow(ring, chosen, limit)
            return EventStreamResponse(frames, _encode_error, _NO_STORE, keep_alive_s=_KEEP_ALIVE_S)
        lines = _last(chosen.choose(ring.since(0)[1]), limit)
        data = [msgspec.to_builtins(each) for each in lines]
        return json_response({"object": "list", "data": data}, 200, _NO_STORE)

    async def _follow(self, ring: LogRing, chosen: LineFilter, limit: int) -> AsyncGenerator[bytes, None]:
        """Yield the lines that there are, and then those that come, until the server drains."""
        yield b": lines of the log\n\n"
        count, kept = ring.since(0)
        lines = _last(chosen.choose(kept), limit)
        while True:
            if lines:
                yield b"".join(b"event: line\ndata: %b\n\n" % msgspec.json.encode(each) for each in lines)
            if self._service.phase is Phase.DRAINING:
                return
            await asyncio.sleep(_LOOK_S)
            count, new = ring.since(count)
            lines = chosen.choose(new)


def _last(lines: list[LogLine], limit: int) -> list[LogLine]:
    return lines[max(0, len(lines) - limit) :]


def _encode_error(error: SluiceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % openai_error_body(error)
