"""Kept streams by their id: read on with GET, as browsers' EventSource does, and cancelled with DELETE."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from sluice.errors import invalid
from sluice.gateway.answers.streams.response import KeptResponse
from sluice.gateway.answers.streams.service import StreamService
from sluice.gateway.answers.streams.wishes import LAST_EVENT_HEADER, parse_event_id
from sluice.gateway.front.http.request import owner_of
from sluice.gateway.options.http import HttpOptions


def router(streams: StreamService, options: HttpOptions) -> APIRouter:
    """Return the routes under /v1/streams."""
    api = APIRouter(prefix="/v1/streams", tags=["streams"], default_response_class=Response)

    @api.get("/{stream_id}")
    async def read(request: Request, stream_id: str, starting_after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Return the events of a resumable stream, those after the header Last-Event-ID or `starting_after`; 204 where
        it has ended, and none are left."""
        last_event, num_takeovers = request.headers.get(LAST_EVENT_HEADER), None
        if last_event:
            named, num_takeovers, starting_after = parse_event_id(last_event)
            if named != stream_id:
                raise invalid(LAST_EVENT_HEADER, f"{LAST_EVENT_HEADER} must be of stream {stream_id}, got {last_event}")
        kept = await streams.find(owner_of(request.headers), stream_id, request.scope)
        if kept.has_ended and starting_after == len(kept.log):
            return Response(status_code=HTTPStatus.NO_CONTENT)  # with which EventSource stops coming back
        return KeptResponse(kept, starting_after, options.sse_keep_alive_s, num_takeovers=num_takeovers)

    @api.delete("/{stream_id}")
    async def cancel(request: Request, stream_id: str) -> Response:
        """Cancel a resumable stream: its generation ends, and its events are kept no longer."""
        await streams.cancel(owner_of(request.headers), stream_id, request.scope)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    return api
