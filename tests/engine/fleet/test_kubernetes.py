"""Members from EndpointSlices, read from a server that speaks the list and watch of Kubernetes' API."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sluice.engine.fleet.membership import kubernetes
from sluice.engine.fleet.membership.kubernetes import ApiServer, KubernetesMembership
from sluice.engine.fleet.membership.members import Member
from sluice.errors import ErrorCode, SluiceError
from tests.waiting import PATIENCE_S, until

SERVICE = "k8s://prod/sluice-engine"
Object = dict[str, Any]


@pytest.fixture(autouse=True)
def ask_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_DELAY_S", 0.02)


def slice_of(name: str, *endpoints: Object, port: str = "engine") -> Object:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "sluice-engine"}},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": port, "port": 5557, "protocol": "TCP"}, {"name": "health", "port": 8080}],
    }


def endpoint(pod: str, address: str, **conditions: bool) -> Object:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}


class Cluster:
    """The EndpointSlices of one namespace, with every change since the start."""

    def __init__(self) -> None:
        self.slices: dict[str, Object] = {}
        self.token = "first"
        self.status = 200
        self.garbage = b""
        """What it answers to lists instead, where set."""
        self.oldest = 0
        """Changes up to here are no longer kept."""
        self.num_lists = 0
        self._changes: list[Object] = []
        self._has_changed = asyncio.Event()
        self.app = Starlette(
            routes=[Route("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", self.serve)]
        )

    def put(self, found: Object) -> None:
        name = found["metadata"]["name"]
        self._note("MODIFIED" if name in self.slices else "ADDED", found)
        self.slices[name] = found

    def delete(self, name: str) -> None:
        self._note("DELETED", self.slices.pop(name))

    def _note(self, kind: str, found: Object) -> None:
        found["metadata"]["resourceVersion"] = str(len(self._changes) + 1)
        self._changes.append({"type": kind, "object": found})
        self.wake()

    def wake(self) -> None:
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    async def serve(self, request: Request) -> Response:
        assert request.path_params["namespace"] == "prod"
        assert request.query_params["labelSelector"] == "kubernetes.io/service-name=sluice-engine"
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"kind": "Status", "code": 401, "message": "Unauthorized"}, 401)
        if self.garbage:
            return Response(self.garbage)
        if self.status != 200:
            return JSONResponse({"kind": "Status", "code": self.status}, self.status)
        if "watch" in request.query_params:
            return StreamingResponse(self._watch(int(request.query_params["resourceVersion"])))
        self.num_lists += 1
        version = str(len(self._changes))
        return JSONResponse({"metadata": {"resourceVersion": version}, "items": list(self.slices.values())})

    async def _watch(self, version: int) -> AsyncIterator[bytes]:
        while True:
            if version < self.oldest or self.status != 200:
                gone = {"kind": "Status", "code": 410, "reason": "Expired"}
                yield json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
                return
            for change in self._changes[version:]:
                yield json.dumps(change).encode() + b"\n"
            version = len(self._changes)
            bookmark = {"metadata": {"resourceVersion": str(version)}}
            yield json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n"
            await self._has_changed.wait()


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(cluster.app, port=0, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path


@asynccontextmanager
async def named_by(cluster: Cluster, account: Path) -> AsyncIterator[AsyncIterator[tuple[Member, ...]]]:
    """Follow the service in the cluster."""
    async with running(cluster) as url:
        members = KubernetesMembership(SERVICE, ApiServer(url, account)).watch()
        try:
            yield members
        finally:
            await members.aclose()  # type: ignore[attr-defined]  # it is a generator


async def following(members: AsyncIterator[tuple[Member, ...]]) -> dict[str, str]:
    async with asyncio.timeout(PATIENCE_S):
        return {each.name: each.address for each in await anext(members)}


async def test_members_are_the_endpoints_that_do_not_end(account: Path) -> None:
    cluster = Cluster()
    cluster.put(slice_of("s-1", endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False)))
    async with named_by(cluster, account) as members:
        both = {"a": "tcp://10.0.0.1:5557", "b": "tcp://10.0.0.2:5557"}
        assert await following(members) == both, "an engine's own heartbeat tells whether it is ready"
        cluster.put(slice_of("s-2", endpoint("c", "fd00::3", ready=True)))
        assert await following(members) == both | {"c": "tcp://[fd00::3]:5557"}
        ending = endpoint("a", "10.0.0.1", ready=False, serving=True, terminating=True)
        cluster.put(slice_of("s-1", ending, endpoint("b", "10.0.0.2", ready=True)))
        assert await following(members) == {"b": "tcp://10.0.0.2:5557", "c": "tcp://[fd00::3]:5557"}
        cluster.delete("s-2")
        assert await following(members) == {"b": "tcp://10.0.0.2:5557"}
    assert cluster.num_lists == 1, "changes are watched"


async def test_what_was_named_last_stays_while_the_api_server_fails(
    account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with named_by(cluster, account) as members:
        assert await following(members) == {"a": "tcp://10.0.0.1:5557"}
        cluster.status = 503
        cluster.wake()
        next_ = asyncio.ensure_future(following(members))
        await until(lambda: "answers 503" in caplog.text)
        assert "the 1 that it had stay" in caplog.text
        cluster.status = 200
        for garbage, problem in ((b'{"name": "\xff"}', "utf-8"), (b'{"x": ' + b"[" * 100_000, "recursion")):
            cluster.garbage = b'{"metadata": ' + garbage
            await until(lambda problem=problem: problem in caplog.text.lower())
        cluster.garbage = b""
        assert not next_.done()
        cluster.put(slice_of("s", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
        cluster.status = 200
        assert await next_ == {"a": "tcp://10.0.0.1:5557", "b": "tcp://10.0.0.2:5557"}


async def test_a_version_that_is_no_longer_kept_is_listed_anew_and_a_new_token_is_read(account: Path) -> None:
    cluster = Cluster()
    cluster.put(slice_of("s", endpoint("a", "10.0.0.1")))
    async with named_by(cluster, account) as members:
        assert await following(members) == {"a": "tcp://10.0.0.1:5557"}
        cluster.token = "second"
        (account / "token").write_text("second")
        cluster.slices["s"] = slice_of("s", endpoint("b", "10.0.0.2"))
        cluster.oldest = 1_000
        cluster.wake()
        assert await following(members) == {"b": "tcp://10.0.0.2:5557"}
    assert cluster.num_lists >= 2


async def test_the_port_is_the_one_named_engine_or_the_only_one(account: Path) -> None:
    cluster = Cluster()
    cluster.put(slice_of("several", endpoint("a", "10.0.0.1"), port="other"))
    alone = slice_of("alone", endpoint("b", "10.0.0.2"))
    alone["ports"] = [{"name": "", "port": 7000}]
    cluster.put(alone)
    async with named_by(cluster, account) as members:
        assert await following(members) == {"b": "tcp://10.0.0.2:7000"}


@pytest.mark.parametrize("name", ["k8s://prod", "k8s://", "k8s://prod/a/b", "k8s://Prod/a"])
def test_a_service_is_named_by_its_namespace_and_name(name: str) -> None:
    with pytest.raises(SluiceError, match=f"k8s://NAMESPACE/SERVICE, got '{name}'") as raised:
        KubernetesMembership(name, ApiServer("http://127.0.0.1:1"))
    assert raised.value.code is ErrorCode.INVALID


def test_outside_of_a_pod_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SluiceError, match="from within a pod"):
        ApiServer.of_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ApiServer.of_pod().url == "https://[fd00::1]:443"
