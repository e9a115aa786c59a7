"""The routes of the protocols beside v2, each with the parts of the server that it answers from."""

from fastapi import APIRouter

from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.streams import http as kept_streams
from sluice.gateway.answers.streams.service import StreamService
from sluice.gateway.answers.streams.store import StreamCollector
from sluice.gateway.api.anthropic import batches as message_batches
from sluice.gateway.api.anthropic import messages
from sluice.gateway.api.ollama import routes as ollama
from sluice.gateway.api.openai import batches as openai_batches
from sluice.gateway.api.openai import derendering, encoders, vllm
from sluice.gateway.api.openai import routes as openai
from sluice.gateway.api.openai.responses import routes as responses
from sluice.gateway.api.rag import routes as rag
from sluice.gateway.api.translators import Answering
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.server import Server

SOCKET_PATHS = frozenset((responses.PATH,))
"""Paths of the WebSockets."""


def add_routes(router: APIRouter, *parts: APIRouter) -> None:
    """Add the routes of all parts, with the prefixes, tags and defaults of their own routers.

    FastAPI's `include_router` has more to offer and costs more: it makes each route anew at the first request, and asks
    one router after the other for every request.
    """
    for part in parts:
        router.routes.extend(part.routes)


def protocol_routers(
    server: Server, config: ServeConfig, streams: StreamService, batches: BatchService | None
) -> list[APIRouter]:
    """Return the routes of all protocols. `batches` None: no files and no batches."""
    plane, answering = server.plane, Answering(server.plane, config)
    routers = [openai.router(plane, config, answering), encoders.router(plane, config, answering)]
    routers.append(vllm.router(plane, server.v2.adapters, config))
    routers += [derendering.router(plane, config, answering)]
    routers += [responses.router(plane, config, answering, streams.store, server.rooms)]
    routers += [each.router(plane, config, answering) for each in (messages, ollama)]
    if batches is not None:
        routers += [openai_batches.router(batches, config), message_batches.router(batches, config)]
    if server.library is not None:
        routers.append(rag.router(answering, server.library, config.http))
    routers.append(kept_streams.router(streams, config.http))
    return routers


def open_streams(rooms: Rooms, options: ResumeOptions) -> StreamService:
    """Build what keeps streams and answers. With a Redis in `options` it is to be made on the event loop."""
    streams = StreamService(options)
    rooms.join(StreamCollector(streams.store), close=streams.close)
    if streams.store.shared is not None:
        shared = streams.store.shared
        rooms.join(notice=lambda: shared.problem, leave=shared.close)
    return streams
