"""The HTTP applications: the protocols on one port, the metrics on another."""

from collections.abc import Awaitable, Callable, Collection
from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice import __version__
from sluice.gateway.answers.batches.line_run import RouteAnswers
from sluice.gateway.answers.batches.lines import ENDPOINTS
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.streams.http import StreamMiddleware
from sluice.gateway.answers.streams.service import StreamService
from sluice.gateway.api import root
from sluice.gateway.api.apis import SOCKET_PATHS, add_routes, protocol_routers
from sluice.gateway.api.v2.http.app import V2App
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.access import PageGuard
from sluice.gateway.front.http.errors import install_error_handlers, is_ollama, is_v2
from sluice.gateway.front.http.exchange import HotRoutes
from sluice.gateway.front.http.guard import Guard, GuardedRoutes, GuardMiddleware, RequestTracing
from sluice.gateway.front.http.openapi import serve_docs
from sluice.gateway.front.listeners import OtherPorts
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from sluice.gateway.telemetry.aliases import AliasedRegistry
from sluice.gateway.telemetry.exposition import choose_writer
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.watch.watching import watching_routers
from sluice.pipelines.answers.notes import AnswerNotes, current_notes

ANSWER_HEADERS = ("x-sluice-target", "x-sluice-attempts", "x-sluice-cache")
"""Headers of answers that came through a route or a cache."""


def create_app(
    server: Server,
    config: ServeConfig,
    streams: StreamService,
    batches: BatchService | None = None,
    ports: OtherPorts | None = None,
) -> "Protocols":
    """Return the protocols' application, behind the API key where there is one.

    `batches` None: no files and no batches.
    """
    app = FastAPI(
        title="Sluice",
        summary="LLM streaming gateway: OpenAI and Triton v2 over one in-flight batching engine",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    plane, calls, tracer = server.plane, server.accounts.calls, server.v2.tracer
    has_library, ports = server.library is not None, ports or OtherPorts()
    add_routes(app.router, root.router(plane, server.rooms, config.http, ports, has_library=has_library))
    add_routes(app.router, *protocol_routers(server, config, streams, batches), *watching_routers(server, config))
    install_error_handlers(app)
    serve_docs(app)
    app.add_middleware(StreamMiddleware, streams=streams, options=config.http)
    tracing = RequestTracing(tracer, plane.repository.versions) if tracer.is_active else None
    pages = make_page_guard(calls, config)
    guard = make_guard(server.metrics, calls, pages, Restrictions(config.http.restrictions), tracing)
    app.add_middleware(GuardMiddleware, guard=guard)
    v2 = V2App(server.v2, config)
    has_notes, origins = bool(plane.routes) or plane.answers is not None, config.access.cors_origins
    wrap = partial(_wrap, origins=origins, has_notes=has_notes)
    hot = GuardedRoutes(v2.hot, guard, takes_pages=not origins).routes
    routes = [each for each in app.routes if isinstance(each, APIRoute) and "POST" in (each.methods or ())]
    handlers = {each.path: each.endpoint for each in routes if each.path in ENDPOINTS}
    return Protocols(wrap(app), wrap(GuardMiddleware(v2, guard)), hot, RouteAnswers(guard, handlers))


def _wrap(app: ASGIApp, origins: Collection[str], *, has_notes: bool) -> ASGIApp:
    """Return `app` with the headers that pages of `origins` need, and those of routes and caches with `has_notes`."""
    if has_notes:
        app = AnswerHeadersMiddleware(app)
    if not origins:
        return app
    exposed = ("x-request-id", "retry-after", "warning", "x-sluice-stream", "idempotent-replayed", *ANSWER_HEADERS)
    return CORSMiddleware(app, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=exposed)


def make_page_guard(calls: CallLog, config: ServeConfig) -> PageGuard:
    """Build what refuses strangers' web pages while nobody is asked for a key."""
    return PageGuard(calls, config.access.cors_origins, config.access.allowed_hosts, config.http.host)


class Protocols:
    """Sends what is under /v2 to an application of its own: the framework's routing costs more than an inference."""

    def __init__(self, app: ASGIApp, v2: ASGIApp, hot: HotRoutes, answer: RouteAnswers) -> None:
        """`hot` are the routes that are answered without an application, and `answer` answers requests of batches."""
        self._app = app
        self._v2 = v2
        self.hot = hot
        self.answer = answer
        self.socket_paths = SOCKET_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._v2 if is_v2(scope.get("path", "")) else self._app)(scope, receive, send)


def make_guard(
    metrics: GatewayMetrics,
    calls: CallLog,
    pages: PageGuard | None = None,
    restrictions: Restrictions | None = None,
    tracing: RequestTracing | None = None,
) -> Guard:
    """Build what stands before routes. `tracing` None: nobody records requests."""

    def count(path: str, status: int) -> None:
        metrics.count_response(_protocol(path), status)

    return Guard(calls, count, _protocol, pages, restrictions, tracing)


def create_metrics_app(
    metrics: GatewayMetrics,
    calls: CallLog,
    gather: Callable[[], Awaitable[CollectorRegistry]] | None = None,
    aliases: Collection[str] = (),
    pages: PageGuard | None = None,
) -> Starlette:
    """Return the application of GET /metrics, in Prometheus' text format or OpenMetrics, as the scraper asks.

    `gather` returns the registry of a server with several processes; None: there is no other than that of `metrics`.
    `aliases` are the servers under whose names the metrics are shown too.
    """

    async def scrape(request: Request) -> Response:
        encode, content_type = choose_writer(request.headers.get("accept", ""))
        registry = metrics.registry if gather is None else await gather()
        return Response(encode(AliasedRegistry(registry, aliases)), headers={"content-type": content_type})

    app = Starlette(routes=[Route("/metrics", scrape)])
    app.router.redirect_slashes = False
    install_error_handlers(app)
    app.add_middleware(GuardMiddleware, guard=make_guard(metrics, calls, pages))
    return app


def _protocol(path: str) -> str:
    """Return the label of a path in the metrics: one of few, whatever clients ask for."""
    if is_v2(path):
        return "v2"
    if path.startswith("/v1/"):
        return "rag" if path.startswith("/v1/rag/") else "openai"
    if is_ollama(path):
        return "ollama"
    return "other"


class AnswerHeadersMiddleware:
    """Adds what the notes of an answer say when it starts. Only servers with routes or a cache have it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes = AnswerNotes()
        current_notes.set(notes)

        async def send_with_notes(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *notes.headers()]
            await send(message)

        await self._app(scope, receive, send_with_notes)
