"""The HTTP applications: the protocols on one port, the metrics on another."""

from collections.abc import Awaitable, Callable, Collection
from functools import partial

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice import __version__
from sluice.gateway.batches.service import BatchService
from sluice.gateway.calls import BATCH, CallLog
from sluice.gateway.http import admin, live, live_requests, logs, profile, root, sleep, timelines, usage
from sluice.gateway.http.access import IN_PROCESS, CallMiddleware, PageGuard, PageMiddleware, RestrictedApiMiddleware
from sluice.gateway.http.answer_headers import ANSWER_HEADERS, AnswerHeadersMiddleware
from sluice.gateway.http.anthropic import batches as message_batches
from sluice.gateway.http.anthropic import routes as anthropic_routes
from sluice.gateway.http.console import routes as console_routes
from sluice.gateway.http.direct import Direct, GuardedDirect
from sluice.gateway.http.errors import install_error_handlers, is_ollama, is_v2
from sluice.gateway.http.in_process import InProcessClient
from sluice.gateway.http.ollama import routes as ollama_routes
from sluice.gateway.http.openai import batches as batch_routes
from sluice.gateway.http.openai import routes as openai_routes
from sluice.gateway.http.openapi import serve_docs
from sluice.gateway.http.rag import routes as rag_routes
from sluice.gateway.http.request import RequestIdMiddleware
from sluice.gateway.http.routers import add_routes
from sluice.gateway.http.streams import routes as stream_routes
from sluice.gateway.http.streams.middleware import StreamMiddleware
from sluice.gateway.http.streams.service import StreamService
from sluice.gateway.http.tracing import TraceMiddleware
from sluice.gateway.http.v2.app import V2App
from sluice.gateway.live.alerts import AlertJudge
from sluice.gateway.live.feeds import LiveFeeds
from sluice.gateway.live.sampler import WatchedServer
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.restrictions import ApiCategory, Restrictions
from sluice.gateway.service import InferenceService
from sluice.gateway.streams.metrics import StreamCollector
from sluice.gateway.telemetry.aliases import AliasedRegistry
from sluice.gateway.telemetry.exposition import choose_writer
from sluice.gateway.telemetry.metrics import GatewayMetrics


def create_app(
    service: InferenceService,
    config: ServeConfig,
    metrics_port: int | None = None,
    batches: BatchService | None = None,
) -> ASGIApp:
    """Return the protocols' application, behind the API key where there is one.

    `metrics_port` is where `create_metrics_app` is served; None: nowhere. `batches` None: no files and no batches.
    """
    app = FastAPI(
        title="Sluice",
        summary="LLM streaming gateway: OpenAI and Triton v2 over one in-flight batching engine",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    restrictions = Restrictions(config.http.restrictions)
    add_routes(app.router, root.router(service, config.http, metrics_port))
    if config.http.serves_console:
        add_routes(app.router, console_routes.router())
    add_routes(app.router, openai_routes.router(service, config), sleep.router(service))
    add_routes(app.router, anthropic_routes.router(service, config), ollama_routes.router(service, config))
    if batches is not None:
        add_routes(app.router, batch_routes.router(batches, config), message_batches.router(batches, config))
    if service.library is not None:
        add_routes(app.router, rag_routes.build_router(service, service.library, config))
    add_routes(app.router, admin.tenant_router(service.calls.access, config.http), usage.router(service))
    add_routes(app.router, admin.router(service.calls.access, config.http), live_requests.router(service.live))
    add_routes(app.router, logs.router(service), live.router(make_feeds(service, config)))
    add_routes(app.router, timelines.router(service.timelines), profile.router(service.profiler))
    streams = open_streams(service, config)
    add_routes(app.router, stream_routes.router(streams, config.http))
    install_error_handlers(app)
    serve_docs(app)
    app.add_middleware(StreamMiddleware, streams=streams, options=config.http)
    pages = make_page_guard(service.calls, config)
    guards: Callable[[ASGIApp], ASGIApp] = partial(
        _Guards,
        metrics=service.metrics,
        calls=service.calls,
        restrictions=restrictions,
        traced=partial(TraceMiddleware, tracer=service.tracer, find_versions=service.repository.versions)
        if service.tracer.is_active
        else None,
        pages=pages,
    )
    app.add_middleware(guards)
    v2 = V2App(service, config)
    count = service.metrics.count_response
    direct = None
    if not service.tracer.is_exporting:  # what is answered directly has no trace
        direct = GuardedDirect(v2.direct, service.calls, lambda path, status: count("v2", status), pages)
    is_restricted = restrictions.find(ApiCategory.INFERENCE) is not None
    whole: ASGIApp = _Protocols(app, guards(v2), None if is_restricted else direct)
    if service.routes or service.answers is not None:
        whole = AnswerHeadersMiddleware(whole)
    if origins := config.access.cors_origins:
        exposed = ("x-request-id", "retry-after", "warning", "x-sluice-stream", "idempotent-replayed", *ANSWER_HEADERS)
        whole = CORSMiddleware(whole, origins, allow_methods=("*",), allow_headers=("*",), expose_headers=exposed)
    if batches is not None:
        batches.answer = InProcessClient(whole)
    return whole


def make_page_guard(calls: CallLog, config: ServeConfig) -> PageGuard:
    """Build what refuses strangers' web pages while nobody is asked for a key."""
    return PageGuard(calls, config.access.cors_origins, config.access.allowed_hosts, config.http.host)


def open_streams(service: InferenceService, config: ServeConfig) -> StreamService:
    """Build what keeps streams and answers. It ends with the service."""
    streams = StreamService(config.streams)
    service.close_last(streams.close)
    service.streams = streams.store
    service.metrics.registry.register(StreamCollector(streams.store))
    if streams.store.shared is not None:
        shared = streams.store.shared
        service.notices.append(lambda: shared.problem)
    return streams


def make_feeds(service: InferenceService, config: ServeConfig) -> LiveFeeds:
    """Build what samples the server for those who watch."""
    num_workers = config.http.num_workers if config.http.num_workers > 1 else 0
    return LiveFeeds(WatchedServer(service, AlertJudge(service), config.shutdown.heartbeat_timeout_s, num_workers))


class _Protocols:
    """Sends what is under /v2 to an application of its own: the framework's routing costs more than an inference."""

    def __init__(self, app: ASGIApp, v2: ASGIApp, direct: Direct | None) -> None:
        """`direct` answers what needs none of what an application may be wrapped in; None: nothing does."""
        self._app = app
        self._v2 = v2
        self.direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._v2 if is_v2(scope.get("path", "")) else self._app)(scope, receive, send)


class _Guards:
    """Wraps an application in what every request passes: its id, its trace, its count, its page, its call, and keys."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        calls: CallLog,
        restrictions: Restrictions | None = None,
        traced: Callable[[ASGIApp], ASGIApp] | None = None,
        pages: PageGuard | None = None,
    ) -> None:
        """`traced` wraps an application in what records requests; None: nobody records."""
        unguarded = app
        if restrictions:
            app = RestrictedApiMiddleware(app, restrictions)
        self._calls = calls
        self._traced = traced
        self._pages = pages or PageGuard(calls)
        self._guarded = self._with_id(app, unguarded, metrics)
        in_calls = CallMiddleware(app, self._calls, _protocol), CallMiddleware(unguarded, self._calls, _batch)
        self._guarded_calls = self._with_id(*in_calls, metrics)

    def _with_id(self, guarded: ASGIApp, unguarded: ASGIApp, metrics: GatewayMetrics) -> tuple[ASGIApp, ASGIApp]:
        guarded = PageMiddleware(guarded, self._pages)
        if self._traced is not None:
            guarded, unguarded = self._traced(guarded), self._traced(unguarded)
        return (
            RequestIdMiddleware(guarded, lambda path, status: metrics.count_response(_protocol(path), status)),
            RequestIdMiddleware(unguarded, lambda path, status: None),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        apps = self._guarded_calls if self._calls.is_active else self._guarded
        await apps[IN_PROCESS in scope](scope, receive, send)


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
    app.add_middleware(_Guards, metrics=metrics, calls=calls, pages=pages)
    return app


def _batch(path: str) -> str:
    return BATCH


def _protocol(path: str) -> str:
    """Return the label of a path in the metrics: one of few, whatever clients ask for."""
    if is_v2(path):
        return "v2"
    if path.startswith("/v1/"):
        return "rag" if path.startswith("/v1/rag/") else "openai"
    if is_ollama(path):
        return "ollama"
    return "other"
