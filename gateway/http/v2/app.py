"""Triton's HTTP protocol as one ASGI application. It parses its paths itself: infer is too hot for a framework."""

import logging
from functools import lru_cache

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import as_sluice_error
from gateway.http.v2.body import BodyReader
from gateway.http.v2.changes import SettingRoutes
from gateway.http.v2.control import RepositoryRoutes
from gateway.http.v2.errors import method_not_allowed, not_found, reply_error
from gateway.http.v2.exchange import Exchange
from gateway.http.v2.generate import GenerateRoute
from gateway.http.v2.headers import STICKY, HeaderReader
from gateway.http.v2.infer import InferRoute
from gateway.http.v2.models import ModelRoutes
from gateway.http.v2.regions import CudaMemoryRoutes, SystemMemoryRoutes
from gateway.http.v2.router import Router, get, get_or_post, post
from gateway.http.v2.routing import RoutingRoute
from gateway.http.v2.target import Target
from gateway.options.config import ServeConfig
from gateway.v2.service import Service
from serving.model import Model

log = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
"""nginx's number for a client that left; only our own log and metrics ever see it."""

_MOST_PATHS = 1024
"""Paths whose routes are remembered; clients ask for few."""


def create_v2(service: Service, config: ServeConfig, forwarded_headers: str = "") -> ASGIApp:
    """The application for /v2 and all below. `forwarded_headers` is the pattern of headers that become parameters."""
    return V2App(service, config, forwarded_headers)


class V2App:
    """Routes a request, and turns failures into Triton's answers."""

    def __init__(self, service: Service, config: ServeConfig, forwarded_headers: str) -> None:
        self._service = service
        body = BodyReader(config.http.max_input_bytes)
        headers = HeaderReader(config.requests, forwarded_headers)
        self._infer = InferRoute(service, body, headers)
        self._generate = GenerateRoute(service, body, headers)
        self._find = lru_cache(_MOST_PATHS)(self._routes(body).find)

    def _routes(self, body: BodyReader) -> Router:
        models = ModelRoutes(self._service)
        repository = RepositoryRoutes(self._service, body)
        settings = SettingRoutes(self._service, body)
        system, cuda = SystemMemoryRoutes(self._service, body), CudaMemoryRoutes(body)
        return Router(
            fixed={
                "/v2": get(models.server),
                "/v2/health/live": get(models.live),
                "/v2/health/ready": get(models.ready),
                "/v2/models/stats": get(models.statistics),
                "/v2/trace/setting": get_or_post(settings.trace),
                "/v2/logging": get_or_post(settings.log),
                "/v2/repository/index": post(repository.index),
            },
            metadata=get(models.metadata),
            trace_of_model=get_or_post(settings.trace),
            of_model={
                "infer": post(self._answer_infer),
                "generate": post(self._answer_generate),
                "generate_stream": post(self._answer_generate_stream),
                "ready": get(models.model_ready),
                "config": get(models.config),
                "stats": get(models.statistics),
            },
            of_region={
                "systemsharedmemory": {
                    "status": get(system.status),
                    "register": post(system.register),
                    "unregister": post(system.unregister),
                },
                "cudasharedmemory": {
                    "status": get(cuda.status),
                    "register": post(cuda.register),
                    "unregister": post(cuda.unregister),
                },
            },
            of_repository={
                "load": post(repository.load),
                "unload": post(repository.unload),
                "routing": get_or_post(RoutingRoute(self._service, body).answer),
            },
            refuse_repository=post(repository.refuse_repository),
        )

    def _model(self, exchange: Exchange, target: Target) -> Model:
        return self._service.route(target.name, target.version_number, exchange.header(STICKY))

    async def _answer_infer(self, exchange: Exchange, target: Target) -> None:
        await self._infer.answer(exchange, self._model(exchange, target), target)

    async def _answer_generate(self, exchange: Exchange, target: Target) -> None:
        await self._generate.answer_whole(exchange, self._model(exchange, target), target)

    async def _answer_generate_stream(self, exchange: Exchange, target: Target) -> None:
        await self._generate.answer_stream(exchange, self._model(exchange, target), target)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        log.debug("HTTP request: %s %s", exchange.method, exchange.path)
        try:
            await self._answer(exchange)
        except ClientDisconnect:
            await exchange.reply(_CLIENT_CLOSED_REQUEST)
        except Exception as error:
            if exchange.has_started:
                raise  # the server closes the connection, so that nothing looks complete
            refusal = as_sluice_error(error, exchange.request_id)
            # It holds the frames that it passed, and they the job and its response that hold it. Left to the garbage
            # collector, refusals under load would stop everything else for a tenth of a second every other second.
            error.__traceback__ = None
            await reply_error(exchange, refusal)

    async def _answer(self, exchange: Exchange) -> None:
        found = self._find(exchange.path)
        if found is None:
            raise not_found()
        route, target = found
        if exchange.method not in route.methods:
            raise method_not_allowed()
        await route.handler(exchange, target)
