"""The routes of the protocols beside v2, each with the parts of the server that it answers from."""

from fastapi import APIRouter

from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.streams import routes as stream_routes
from sluice.gateway.answers.streams.metrics import StreamCollector
from sluice.gateway.answers.streams.service import StreamService
from sluice.gateway.api.anthropic import batches as message_batches
from sluice.gateway.api.anthropic import routes as anthropic
from sluice.gateway.api.ollama import routes as ollama
from sluice.gateway.api.openai import adapters, classify, embeddings, rerank, tokens
from sluice.gateway.api.openai import batches as openai_batches
from sluice.gateway.api.openai import routes as openai
from sluice.gateway.api.openai.responses import routes as responses
from sluice.gateway.api.rag import routes as rag
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import StreamOptions
from sluice.gateway.plane.rooms import Rooms
from sluice.gateway.server import Server


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
    plane = server.plane
    routers = [openai.router(plane, config), adapters.router(server.v2.adapters, config)]
    routers += [each.router(plane, config) for each in (embeddings, rerank, classify, tokens)]
    routers += [responses.router(plane, config, streams.store, server.rooms)]
    routers += [anthropic.router(plane, config), ollama.router(plane, config)]
    if batches is not None:
        routers += [openai_batches.router(batches, config), message_batches.router(batches, config)]
    if server.library is not None:
        routers.append(rag.build_router(plane, server.library, config))
    routers.append(stream_routes.router(streams, config.http))
    return routers


def open_streams(rooms: Rooms, options: StreamOptions) -> StreamService:
    """Build what keeps streams and answers. With a Redis in `options` it is to be made on the event loop."""
    streams = StreamService(options)
    rooms.join(StreamCollector(streams.store), close=streams.close)
    if streams.store.shared is not None:
        shared = streams.store.shared
        rooms.join(notice=lambda: shared.problem, leave=shared.close)
    return streams
