"""Triton's HTTP protocol as one ASGI application. It parses its paths itself: infer is too hot for a framework."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.http.exchange import (
    STICKY_HEADER,
    AsgiExchange,
    BodyReader,
    HeaderReader,
    RequestTarget,
    refusal_of,
)
from sluice.gateway.api.v2.http.extensions import CudaMemoryRoutes, SettingRoutes, SystemMemoryRoutes
from sluice.gateway.api.v2.http.generate import GenerateRoute
from sluice.gateway.api.v2.http.infer import InferRoute
from sluice.gateway.api.v2.http.models import ModelRoutes, RepositoryRoutes, VersionRoutingRoute
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.front.http.errors import CLIENT_CLOSED_REQUEST
from sluice.gateway.front.http.exchange import JSON, ConnectionExchange, Exchange, HotRoutes, RawHeaders
from sluice.gateway.options.config import ServeConfig
from sluice.serving.model import Model

log = logging.getLogger(__name__)
_MAX_CACHED_PATHS = 1024
"""Most paths whose routes are remembered; clients use few."""
_MODELS = b"/v2/models/"
Handler = Callable[[AsgiExchange, RequestTarget], Awaitable[None]]
_NO_TARGET = RequestTarget()


@dataclass(frozen=True, slots=True)
class V2Route:
    """The handler of a path, and the methods that it takes."""

    handler: Handler
    methods: frozenset[str]


def _get(handler: Handler) -> V2Route:
    return V2Route(handler, frozenset(("GET",)))


def _post(handler: Handler) -> V2Route:
    return V2Route(handler, frozenset(("POST",)))


def _get_or_post(handler: Handler) -> V2Route:
    return V2Route(handler, frozenset(("GET", "POST")))


@dataclass(frozen=True, slots=True)
class Router:
    """The routes by the fixed words of their paths.

    The keys of `fixed` are whole paths; those of `model_actions` follow /v2/models/NAME or …/versions/NUMBER, and
    `metadata` answers where nothing follows. `region_actions` has, by kind of shared memory, the words that follow the
    kind or …/region/NAME; those of `repository_actions` follow /v2/repository/models/NAME.
    """

    fixed: Mapping[str, V2Route]
    metadata: V2Route
    model_trace: V2Route
    model_actions: Mapping[str, V2Route]
    region_actions: Mapping[str, Mapping[str, V2Route]]
    repository_actions: Mapping[str, V2Route]
    refuse_repository: V2Route

    def find(self, path: str) -> tuple[V2Route, RequestTarget] | None:
        """Return the route, and what the path names; None where there is no route."""
        route = self.fixed.get(path)
        if route is not None:
            return route, _NO_TARGET
        _, _, *parts = path.split("/")
        match parts:
            case ["models", name, *rest] if name:
                return self._model(name, rest)
            case ["repository", *rest]:
                return self._repository(rest)
            case [kind, "region", region, action] if region:
                return _named(self.region_actions.get(kind, {}).get(action), RequestTarget(region))
            case [kind, action]:
                return _named(self.region_actions.get(kind, {}).get(action), _NO_TARGET)
        return None

    def _model(self, name: str, rest: list[str]) -> tuple[V2Route, RequestTarget] | None:
        match rest:
            case [action]:
                return _named(self.model_actions.get(action), RequestTarget(name))
            case []:
                return self.metadata, RequestTarget(name)
            case ["versions", version] if _is_number(version):
                return self.metadata, RequestTarget(name, version)
            case ["versions", version, action] if _is_number(version):
                return _named(self.model_actions.get(action), RequestTarget(name, version))
            case ["trace", "setting"]:
                return self.model_trace, RequestTarget(name)
        return None

    def _repository(self, rest: list[str]) -> tuple[V2Route, RequestTarget] | None:
        match rest:
            case ["models", name, action] if name:
                return _named(self.repository_actions.get(action), RequestTarget(name))
            case [repository, "index"] if repository:
                return self.fixed["/v2/repository/index"], _NO_TARGET
            case [repository, "models", name, action] if repository and name and action in self.repository_actions:
                return self.refuse_repository, RequestTarget(name)
        return None


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit()


def _named(route: V2Route | None, target: RequestTarget) -> tuple[V2Route, RequestTarget] | None:
    return None if route is None else (route, target)


class V2App:
    """The application for /v2 and all below: routes a request, and turns failures into Triton's answers."""

    def __init__(self, server: V2Server, config: ServeConfig) -> None:
        self._server = server
        body = BodyReader(config.http.max_input_bytes)
        headers = HeaderReader(config.requests, config.http.forwarded_headers)
        self._infer = InferRoute(server, body, headers, self._model)
        self._generate = GenerateRoute(server, body, headers)
        self.hot = HotRoutes(self.takes, self.begin)
        self._find = lru_cache(_MAX_CACHED_PATHS)(self._routes(body).find)

    def _routes(self, body: BodyReader) -> Router:
        models = ModelRoutes(self._server)
        repository = RepositoryRoutes(self._server, body)
        settings = SettingRoutes(self._server, body)
        system, cuda = SystemMemoryRoutes(self._server, body), CudaMemoryRoutes(self._server, body)
        return Router(
            fixed={
                "/v2": _get(models.server),
                "/v2/health/live": _get(models.live),
                "/v2/health/ready": _get(models.ready),
                "/v2/models/stats": _get(models.statistics),
                "/v2/trace/setting": _get_or_post(settings.trace),
                "/v2/logging": _get_or_post(settings.log),
                "/v2/repository/index": _post(repository.index),
            },
            metadata=_get(models.metadata),
            model_trace=_get_or_post(settings.trace),
            model_actions={
                "infer": _post(self._answer_infer),
                "generate": _post(self._answer_generate),
                "generate_stream": _post(self._answer_generate_stream),
                "ready": _get(models.model_ready),
                "config": _get(models.config),
                "stats": _get(models.statistics),
            },
            region_actions={
                "systemsharedmemory": {
                    "status": _get(system.status),
                    "register": _post(system.register),
                    "unregister": _post(system.unregister),
                },
                "cudasharedmemory": {
                    "status": _get(cuda.status),
                    "register": _post(cuda.register),
                    "unregister": _post(cuda.unregister),
                },
            },
            repository_actions={
                "load": _post(repository.load),
                "unload": _post(repository.unload),
                "routing": _get_or_post(VersionRoutingRoute(self._server, body).answer),
            },
            refuse_repository=_post(repository.refuse_repository),
        )

    def takes(self, url: bytes, headers: RawHeaders) -> bool:
        """Whether `url` is that of an infer route, without anything to decode."""
        if not url.startswith(_MODELS) or b"%" in url or b"?" in url or not url.isascii():
            return False
        found = self._find(url.decode("ascii"))
        return found is not None and found[0].handler == self._answer_infer

    def begin(self, exchange: ConnectionExchange) -> None:
        """Answer a request whose path `takes` has taken."""
        found = self._find(exchange.path)
        assert found is not None
        self._infer.begin(exchange, found[1])

    def _model(self, exchange: Exchange, target: RequestTarget) -> Model:
        return self._server.models.route(target.name, target.version_number, exchange.header(STICKY_HEADER))

    async def _answer_infer(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        await self._infer.answer(exchange, target)
        await exchange.wait()

    async def _answer_generate(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        await self._generate.answer_whole(exchange, self._model(exchange, target), target)

    async def _answer_generate_stream(self, exchange: AsgiExchange, target: RequestTarget) -> None:
        await self._generate.answer_stream(exchange, self._model(exchange, target), target)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)
        log.debug("HTTP request: %s %s", exchange.method, exchange.path)
        try:
            await self._answer(exchange)
        except ClientDisconnect:
            await exchange.reply(CLIENT_CLOSED_REQUEST)
        except Exception as error:
            if exchange.has_started:
                raise  # the server closes the connection, so that nothing looks complete
            status, body, headers = refusal_of(exchange, error)
            await exchange.reply(status, body, JSON, headers)

    async def _answer(self, exchange: AsgiExchange) -> None:
        found = self._find(exchange.path)
        if found is None:
            raise SluiceError(ErrorCode.NOT_FOUND, "Not Found")
        route, target = found
        if exchange.method not in route.methods:
            raise SluiceError(ErrorCode.METHOD_NOT_ALLOWED, "Method Not Allowed")
        await route.handler(exchange, target)
