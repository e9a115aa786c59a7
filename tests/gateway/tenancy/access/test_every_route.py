"""Nothing is reached without a key: every route of both HTTP applications, and every RPC."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc
import httpx
import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tritonclient.grpc import service_pb2

from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.api.app import create_metrics_app, make_guard
from sluice.gateway.api.v2.grpc.methods import API_CATEGORIES
from sluice.gateway.assembly import make_application
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.access import _find_place, find_place
from sluice.gateway.front.http.guard import GuardMiddleware
from sluice.gateway.front.http.openapi import v2_paths
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import make_key
from sluice.gateway.tenancy.access.rights import CATEGORY_GROUPS
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.accounts import Accounts
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from tests.gateway.api.rag.parts import SwitchableStore, WordEncoder
from tests.gateway.api.v2.grpc.parts import serving
from tests.gateway.api.v2.small_service import SmallService
from tests.gateway.repositories import empty_server

KEYS = {group: make_key(Identity(name=group, groups=frozenset({group}))) for group in RouteGroup}
PLAIN = make_key(Identity(name="plain"))
"""A key whose groups nobody named."""
PROBES = {"/health", "/ping", "/v2/health/live", "/v2/health/ready"}
PAGES = {"/console", "/console/x"}
"""The console's files, which say nothing of the server: what its pages show is asked for with a key."""
FOR_EVERY_KEY = {
    *("/", "/version", "/docs", "/openapi.json", "/docs/assets/x", "/v2", "/v1/models", "/v1/models/x", "/v2/models/x"),
    *("/v2/models/x/versions/x", "/v2/models/x/ready", "/v2/models/x/versions/x/ready"),
    *("/v1/requests", "/v1/requests/x/timeline"),
    *("/v1/usage", "/v1/usage/requests", "/api/tags", "/api/show", "/api/ps", "/api/version"),
}
"""Paths that no group has: what the server is, and which of the key's own models it has."""
FOR_NEW_KEYS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"),
    *("/api/generate", "/api/embed", "/api/embeddings", "/v1/embeddings", "/pooling", "/classify", "/tokenize"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/detokenize", "/inference/v1/generate"),
    *(
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/messages/render",
        "/generative_scoring",
        "/v1/systemone",
    ),
    *("/v1/chat/completions/derender", "/v1/completions/derender"),
}
"""Paths that a key reaches whose groups nobody named, beside those of every key and those under NEW_KEYS_FOLDERS."""
NEW_KEYS_FOLDERS = (
    *("/v1/messages/batches", "/v1/responses", "/v1/conversations", "/v1/files", "/v1/batches"),
    *("/v1/streams", "/v1/rag", "/v2/systemsharedmemory", "/v2/cudasharedmemory"),
)
"""Where each key has things of its own, and shared memory, which --allow-client-shm allows."""
NEW_KEYS_ACTIONS = ("/infer", "/generate", "/generate_stream", "/config")
"""Actions of such a key on models of the v2 protocol."""
OPEN_RPCS = {
    *("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"),
    *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List"),
}


@pytest.fixture
def calls() -> CallLog:
    ring = KeyRing(None, "sesame")
    ring.keep([*(each.stored for each in KEYS.values()), PLAIN.stored])
    return CallLog(AccessControl(ring))


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route, with `x` for parameters."""
    for each in app.routes:
        if isinstance(each, Mount):
            yield "GET", f"{each.path}/x"
            continue
        for route in [each] if isinstance(each, Route) else each.effective_route_contexts():  # type: ignore[attr-defined]
            for method in route.methods or ():
                yield method, _filled(route.path)


def _filled(path: str) -> str:
    return "/".join("x" if part.startswith("{") else part for part in path.split("/"))


@pytest.fixture
async def applications(calls: CallLog, tmp_path: Any) -> tuple[ASGIApp, ASGIApp, list[tuple[str, str]]]:
    library = DocumentLibrary(SwitchableStore(None), WordEncoder, LibrarySettings())
    config = ServeConfig(batches=BatchOptions(state_path=str(tmp_path)))
    server = empty_server(config, accounts=Accounts(calls), library=library)
    app = make_application(server, config, BatchService(server.plane, server.rooms, config))
    found = {*routes_of(cast(FastAPI, app._app)), *routes_of_v2()}
    return app, create_metrics_app(server.metrics, calls), sorted(found)


def routes_of_v2() -> Iterator[tuple[str, str]]:
    for path, operations in v2_paths().items():
        for method in operations:
            yield method.upper(), _filled(path)
            if path.startswith("/v2/models/{model}"):
                yield method.upper(), _filled(path.replace("{model}", "{model}/versions/{version}"))


@pytest.mark.parametrize(("origins", "allowed"), [((), None), (("https://a.test",), "https://a.test"), (("*",), "*")])
async def test_pages_of_other_origins_are_let_in_only_where_that_is_set(
    calls: CallLog, origins: tuple[str, ...], allowed: str | None
) -> None:
    server = empty_server(accounts=Accounts(calls))
    app = make_application(server, ServeConfig(access=AccessOptions(cors_origins=origins)))
    asked = {"origin": "https://a.test", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        preflight = await client.options("/v1/chat/completions", headers=asked)
        answer = await client.get("/v1/models", headers={"origin": "https://a.test"})
        foreign = await client.get("/v1/models", headers={"origin": "https://b.test"})
    assert preflight.status_code == (401 if allowed is None else 200)
    assert answer.headers.get("access-control-allow-origin") == allowed
    assert foreign.headers.get("access-control-allow-origin") == ("*" if allowed == "*" else None)
    assert answer.status_code == 401


async def ask(app: ASGIApp, method: str, path: str, key: str | None = None) -> int:
    """Return the status of an answer. Hundreds are asked for, so that this is the bare protocol."""
    headers = [(b"host", b"test"), *([] if key is None else [(b"authorization", f"Bearer {key}".encode())])]
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "root_path": "",
    }
    scope |= {"raw_path": path.encode(), "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1)}
    sent: list[Message] = []
    received = iter([{"type": "http.request", "body": b""}])

    async def receive() -> Message:
        return next(received, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_every_route_asks_for_a_key(applications: tuple[ASGIApp, ASGIApp, list[tuple[str, str]]]) -> None:
    app, metrics_app, routes = applications
    assert len(routes) > 90
    assert {"/v1/chat/completions", "/v1/rag/collections", "/v1/batches", "/v2/models/x/infer", "/sleep"} <= {
        path for _, path in routes
    }
    for method, path in routes:
        if path not in PROBES | PAGES:
            assert await ask(app, method, path) == 401, (method, path)
    assert [await ask(metrics_app, "GET", "/metrics", key) for key in (None, "wrong")] == [401, 401]
    assert await ask(metrics_app, "GET", "/metrics", KEYS[RouteGroup.METRICS].text) == 200
    assert await ask(metrics_app, "GET", "/metrics", KEYS[RouteGroup.INFERENCE].text) == 403
    assert await ask(app, "GET", "/no/such/route") == 401


async def test_a_key_reaches_the_routes_of_its_groups_alone(
    applications: tuple[ASGIApp, ASGIApp, list[tuple[str, str]]], calls: CallLog
) -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=204)(scope, receive, send)

    guarded = GuardMiddleware(inner, make_guard(GatewayMetrics(), calls))
    for method, path in applications[2]:
        group = find_place(path).group
        assert (group is None) == (path in FOR_EVERY_KEY | PROBES | PAGES), f"{path} has no group"
        for owned, key in KEYS.items():
            expected = 204 if path in PROBES | PAGES or group in (None, owned) else 403
            assert await ask(guarded, method, path, key.text) == expected, (method, path, owned)


def is_for_new_keys(path: str) -> bool:
    """Whether a route is known to be one that clients need. A new route is none until it is written down here."""
    is_of_model = path.startswith("/v2/models/") and path.endswith(NEW_KEYS_ACTIONS)
    is_own = any(path == each or path.startswith(f"{each}/") for each in NEW_KEYS_FOLDERS)
    return is_of_model or is_own or path in FOR_NEW_KEYS | FOR_EVERY_KEY | PROBES | PAGES


async def test_a_key_without_named_groups_administrates_nothing(
    applications: tuple[ASGIApp, ASGIApp, list[tuple[str, str]]],
) -> None:
    app, metrics_app, routes = applications
    refused = {path for method, path in routes if await ask(app, method, path, PLAIN.text) == 403}
    assert refused == {path for _, path in routes if not is_for_new_keys(path)}
    assert {"/v1/admin/keys", "/v1/admin/profile", "/v2/logging", "/v2/trace/setting", "/sleep"} <= refused
    assert await ask(metrics_app, "GET", "/metrics", PLAIN.text) == 403


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/v1/chat/completions", "inference"),
        ("/v1/responses/resp_1", "inference"),
        ("/v1/messages", "inference"),
        ("/v1/batches", "inference"),
        ("/v1/files", "inference"),
        ("/api/chat", "inference"),
        ("/v2/models/m/infer", "inference"),
        ("/v2/models/m/versions/1/generate_stream", "inference"),
        ("/v2/systemsharedmemory/status", "inference"),
        ("/v1/embeddings", "embeddings"),
        ("/v2/rerank", "embeddings"),
        ("/api/embed", "embeddings"),
        ("/v1/rag/query", "rag"),
        ("/v1/rag/collections", "rag"),
        ("/v1/rag/docs/documents/a/b", "rag"),
        ("/v2/repository/models/m/load", "repository"),
        ("/v1/load_lora_adapter", "repository"),
        ("/sleep", "repository"),
        ("/api/pull", "repository"),
        ("/v1/admin/keys/x", "admin"),
        ("/v2/logging", "admin"),
        ("/v2/models/m/trace/setting", "admin"),
        ("/v2/models/stats", "metrics"),
        ("/v2/models/m/stats", "metrics"),
        ("/metrics", "metrics"),
    ],
)
def test_where_routes_belong(path: str, group: str) -> None:
    assert find_place(path).group == group


def rpcs() -> Iterator[tuple[str, bool]]:
    """Yield each RPC with whether its client streams."""
    services = [
        service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    for service in services:
        for method in service.methods:
            yield f"/{service.full_name}/{method.name}", method.client_streaming


@pytest.fixture
async def channel(calls: CallLog) -> AsyncIterator[Any]:
    service = SmallService()
    service.calls = calls
    async with serving(service) as running:
        yield running.channel


async def call(channel: Any, method: str, streams: bool, key: str | None) -> grpc.StatusCode:
    metadata = None if key is None else [("authorization", f"Bearer {key}")]
    try:
        if streams:
            stream = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=20)
            async for _ in stream:
                break
        elif method.endswith("/Watch"):
            async for _ in channel.unary_stream(method)(b"", metadata=metadata, timeout=20):
                break
        else:
            await channel.unary_unary(method)(b"", metadata=metadata, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_rpc_asks_for_a_key(channel: Any) -> None:
    found = dict(rpcs())
    assert len(found) >= 20
    for method, streams in found.items():
        status = await call(channel, method, streams, None)
        assert (status is grpc.StatusCode.UNAUTHENTICATED) == (method not in OPEN_RPCS), method


async def test_a_key_reaches_the_rpcs_of_its_groups_alone(channel: Any) -> None:
    for method, streams in rpcs():
        category = API_CATEGORIES.get(method.rpartition("/")[2])
        group = None if category is None else CATEGORY_GROUPS[category]
        for owned, key in KEYS.items():
            status = await call(channel, method, streams, key.text)
            assert status is not grpc.StatusCode.UNAUTHENTICATED, method
            assert (status is grpc.StatusCode.PERMISSION_DENIED) == (group not in (None, owned)), (method, owned)


async def test_a_key_without_named_groups_reaches_no_rpc_of_administrators(channel: Any) -> None:
    refused = {
        method.rpartition("/")[2]
        for method, streams in rpcs()
        if await call(channel, method, streams, PLAIN.text) is grpc.StatusCode.PERMISSION_DENIED
    }
    assert refused == {
        *("ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
        *("TraceSetting", "LogSettings"),
    }


def test_what_strangers_send_fills_no_memory() -> None:
    before = _find_place.cache_info().currsize
    assert find_place("/v1/" + "x" * 60_000).group is RouteGroup.INFERENCE
    assert _find_place.cache_info().currsize == before
