"""The HTTP applications: the protocols on one port, the metrics on another."""

from fastapi import FastAPI
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.batches.service import BatchService
from gateway.http import root
from gateway.http.access import ApiKeyMiddleware, RestrictedApiMiddleware
from gateway.http.anthropic import routes as anthropic_routes
from gateway.http.errors import install_error_handlers, is_ollama, is_v2
from gateway.http.in_process import IN_PROCESS, InProcessClient
from gateway.http.ollama import routes as ollama_routes
from gateway.http.openai import batches as batch_routes
from gateway.http.openai import routes as openai_routes
from gateway.http.openapi import serve_docs
from gateway.http.rag import routes as rag_routes
from gateway.http.request import RequestIdMiddleware
from gateway.http.v2.app import V2App
from gateway.options.config import ServeConfig
from gateway.options.http import AccessOptions
from gateway.restrictions import Restrictions
from gateway.service import InferenceService
from gateway.telemetry.metrics import GatewayMetrics
from sluice import __version__


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
    app.include_router(root.router(service, restrictions, metrics_port))
    app.include_router(openai_routes.router(service, config))
    app.include_router(anthropic_routes.router(service, config))
    app.include_router(ollama_routes.router(service, config))
    if batches is not None:
        app.include_router(batch_routes.router(batches, config))
    if service.library is not None:
        app.include_router(rag_routes.build_router(service, service.library, config))
    install_error_handlers(app)
    serve_docs(app)
    app.add_middleware(_Guards, metrics=service.metrics, access=config.access, restrictions=restrictions)
    v2 = V2App(service, config)
    whole = _Protocols(app, _Guards(v2, service.metrics, config.access, restrictions))
    if batches is not None:
        batches.answer = InProcessClient(whole)
    return whole


class _Protocols:
    """Sends what is under /v2 to an application of its own: the framework's routing costs more than an inference."""

    def __init__(self, app: ASGIApp, v2: ASGIApp) -> None:
        self._app = app
        self._v2 = v2

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._v2 if is_v2(scope.get("path", "")) else self._app)(scope, receive, send)


class _Guards:
    """Wraps an application in what every request passes: its id, its count, and the keys where there are any."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, access: AccessOptions, restrictions: Restrictions | None = None
    ) -> None:
        unguarded = app
        if restrictions:
            app = RestrictedApiMiddleware(app, restrictions)
        if access.api_key is not None:
            app = ApiKeyMiddleware(app, api_key=access.api_key)
        self._unguarded = RequestIdMiddleware(unguarded, lambda path, status: None)
        self._guarded = RequestIdMiddleware(app, lambda path, status: metrics.count_response(_protocol(path), status))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._unguarded if IN_PROCESS in scope else self._guarded)(scope, receive, send)


def create_metrics_app(metrics: GatewayMetrics, access: AccessOptions) -> Starlette:
    """Return the application of GET /metrics, in Prometheus' text format or OpenMetrics, as the scraper asks."""

    async def scrape(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"content-type": content_type})

    app = Starlette(routes=[Route("/metrics", scrape)])
    app.router.redirect_slashes = False
    install_error_handlers(app)
    app.add_middleware(_Guards, metrics=metrics, access=access)
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
