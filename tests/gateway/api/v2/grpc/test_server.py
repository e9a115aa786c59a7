import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from sluice.gateway.api.v2.grpc import control, http2_server
from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.calls import CallLog
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.options.option import OptionError
from sluice.gateway.plane.health import Phase
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.identity import Identity
from sluice.gateway.tenancy.access.keys import make_key
from sluice.gateway.tenancy.access.ring import KeyRing
from tests.gateway.api.v2.grpc.parts import EchoModel, HeldModel, failure, infer_request, on_both_servers, serving
from tests.gateway.api.v2.small_service import SmallService
from tests.paths import CERTIFICATES
from tests.waiting import PATIENCE_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def _ends_are_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's clients never answer the end of a connection over TLS."""
    monkeypatch.setattr(http2_server, "_CLOSE_S", 0.05)


def pem(name: str) -> bytes:
    return (CERTIFICATES / name).read_bytes()


def tls(**more: Any) -> GrpcOptions:
    return GrpcOptions(
        port=0,
        server_cert_path=str(CERTIFICATES / "server.pem"),
        server_key_path=str(CERTIFICATES / "server.key"),
        root_cert_path=str(CERTIFICATES / "ca.pem"),
        **more,
    )


async def live(target: str, credentials: Any = None) -> bool:
    channel = grpc.aio.insecure_channel(target) if credentials is None else grpc.aio.secure_channel(target, credentials)
    async with channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool((await stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S)).live)


@on_both_servers
async def test_ports_and_addresses() -> None:
    async with serving(SmallService(), GrpcOptions(port=0, shares_port=True)) as running:
        shared = GrpcServer(SmallService(), GrpcOptions(port=running.port, shares_port=True), "127.0.0.1")
        assert await shared.start() == running.port
        await shared.stop(0)
    async with serving(SmallService()) as running:
        taken = GrpcServer(SmallService(), GrpcOptions(port=running.port), "127.0.0.1")
        with pytest.raises(OSError, match=f"{running.port}.*choose another with --grpc-port"):
            await taken.start()
    server = GrpcServer(SmallService(), GrpcOptions(port=0, host="127.0.0.2"), "127.0.0.1")
    assert await live(f"127.0.0.2:{await server.start()}")
    await server.stop(0)


# --- TLS ---

AUTHORITY = grpc.ssl_channel_credentials(pem("ca.pem"))
KNOWN = grpc.ssl_channel_credentials(pem("ca.pem"), pem("client.key"), pem("client.pem"))


@pytest.mark.parametrize(
    ("options", "taken", "refused"),
    [(tls(uses_ssl=True), AUTHORITY, None), (tls(uses_mutual_ssl=True), KNOWN, AUTHORITY)],
    ids=["TLS", "mutual TLS"],
)
async def test_tls(options: GrpcOptions, taken: Any, refused: Any) -> None:
    async with serving(SmallService(), options) as running:
        target = f"localhost:{running.port}"
        assert await live(target, taken)
        assert (await failure(live(target, refused)))[0] == "UNAVAILABLE"


@pytest.mark.parametrize(("subject", "outcome"), [("localhost", "OK"), ("other", "UNAUTHENTICATED")])
async def test_a_client_s_certificate_stands_for_the_key_with_its_name(subject: str, outcome: str) -> None:
    service, ring = SmallService(EchoModel()), KeyRing(None)
    ring.keep([make_key(Identity(name="a", subject=subject)).stored])
    service.calls = CallLog(AccessControl(ring))
    async with (
        serving(service, tls(uses_mutual_ssl=True)) as running,
        grpc.aio.secure_channel(f"localhost:{running.port}", KNOWN) as channel,
    ):
        asked = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer_request("echo", 1))
        if outcome == "OK":
            assert (await asked).outputs
        else:
            assert (await failure(asked))[0] == outcome


async def test_a_certificate_that_cannot_be_read() -> None:
    options = replace(tls(uses_ssl=True), server_cert_path="/nowhere/none.pem")
    with pytest.raises(OptionError, match="--grpc-server-cert cannot be read"):
        await GrpcServer(SmallService(), options, "127.0.0.1").start()


# --- the API key ---


@on_both_servers
async def test_calls_need_the_key() -> None:
    async with serving(SmallService(EchoModel()), api_key="secret") as running:
        infer = running.stub.ModelInfer
        request = infer_request("echo", 1)
        assert (await failure(infer(request))) == (
            "UNAUTHENTICATED",
            "this server asks for an API key: send the metadata 'authorization: Bearer KEY'",
        )
        for wrong, reason in (
            ("Bearer guess", "the API key is wrong"),
            ("secret", "the authorization metadata must read 'Bearer KEY'"),
        ):
            refused = infer(request, metadata=(("authorization", wrong),))
            assert await failure(refused) == ("UNAUTHENTICATED", reason)
        assert (await infer(request, metadata=(("authorization", "bearer secret"),))).outputs
        stream = running.stub.ModelStreamInfer()
        with pytest.raises(grpc.RpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@on_both_servers
async def test_probes_need_no_key_and_reflection_does() -> None:
    async with serving(SmallService(), api_key="secret") as running:
        assert (await running.stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await running.stub.ServerReady(pb.ServerReadyRequest())).ready
        assert await _check(running.channel) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            await _services(running.channel)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# --- health and reflection ---


async def _check(channel: Any, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


@on_both_servers
async def test_health_of_server_and_models() -> None:
    service, model = SmallService(), EchoModel()
    service.repository.loaded.append(model)
    async with serving(service) as running:
        for name in ("", "echo", "inference.GRPCInferenceService", "anything"):
            assert await _check(running.channel, name) == SERVING
        service.health.phase = Phase.LOADING
        assert await _check(running.channel) == NOT_SERVING
        assert await _check(running.channel, "echo") == SERVING
        service.health.phase = Phase.SERVING
        await model.unload(0)
        assert await _check(running.channel, "echo") == NOT_SERVING


@on_both_servers
async def test_watching_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_WATCH_PERIOD_S", 0.01)
    service = SmallService()
    async with serving(service) as running:
        call = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await call.read()).status == SERVING
        service.health.phase = Phase.LOADING
        assert (await call.read()).status == NOT_SERVING
        service.health.phase = Phase.SERVING
        assert (await call.read()).status == SERVING
        # Begun before: grpc.aio reads nothing any more once it has seen the end, whatever came before that.
        last = asyncio.create_task(call.read())
        stopping = asyncio.create_task(running.server.stop(PATIENCE_S))
        assert (await last).status == NOT_SERVING
        assert await call.read() is grpc.aio.EOF
        await stopping


async def _services(channel: Any) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [found] = [each async for each in stub.ServerReflectionInfo(iter([request]))]
    return sorted(each.name for each in found.list_services_response.service)


@on_both_servers
async def test_reflection_knows_every_service() -> None:
    async with serving(SmallService()) as running:
        assert await _services(running.channel) == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
        ]
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService")
        [found] = [each async for each in stub.ServerReflectionInfo(iter([request]))]
        assert found.file_descriptor_response.file_descriptor_proto


@on_both_servers
async def test_every_method_of_the_protocol_is_there() -> None:
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    async with serving(SmallService()) as running:
        for method in methods:
            path = f"/inference.GRPCInferenceService/{method.name}"
            if method.client_streaming:
                assert [each async for each in running.channel.stream_stream(path)(iter([]))] == []
                continue
            try:
                await running.channel.unary_unary(path)(b"")
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, method.name


# --- compression ---


@asynccontextmanager
async def counted_relay(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """Relay connections to `port`. Yields the relay's port, and the sizes of the data that came back through it."""
    sizes: list[int] = []

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: list[int]) -> None:
        try:
            while data := await source.read(1 << 16):
                counted.append(len(data))
                target.write(data)
                await target.drain()
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, upstream_writer, []), pump(upstream_reader, writer, sizes))

    relay = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield relay.sockets[0].getsockname()[1], sizes
    finally:
        relay.close()


@pytest.mark.parametrize(("level", "is_small"), [("none", False), ("low", True), ("medium", True), ("high", True)])
async def test_messages_are_compressed_when_asked(level: str, is_small: bool) -> None:
    request = infer_request("echo", *([7] * 50_000))
    async with (
        serving(SmallService(EchoModel()), GrpcOptions(port=0, compression_level=level)) as running,
        counted_relay(running.port) as (port, sizes),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response = await stub.ModelInfer(request, compression=grpc.Compression.Gzip)
        assert response.raw_output_contents[0] == request.raw_input_contents[0]
        assert (sum(sizes) < 20_000) is is_small
        sizes.clear()
        stream = [each async for each in stub.ModelStreamInfer(iter([request]), compression=grpc.Compression.Deflate)]
        assert stream[0].infer_response.raw_output_contents[0] == request.raw_input_contents[0]
        assert (sum(sizes) < 20_000) is is_small


# --- the end ---


@on_both_servers
async def test_what_is_under_way_is_answered_before_the_end() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        unary = asyncio.ensure_future(_infer(running.stub, "unary"))
        stream = running.stub.ModelStreamInfer()
        await stream.write(infer_request("held", 1, id="streamed"))
        idle = running.stub.ModelStreamInfer()
        await idle.write(infer_request("held", 1, id="done"))
        await model.until(lambda: len(model.jobs) == 3)
        model.send("done", 1, is_final=True)
        assert await idle.read()
        stopping = asyncio.create_task(running.server.stop(PATIENCE_S))
        with pytest.raises(grpc.RpcError) as caught:
            await idle.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the server is shutting down"
        assert not stopping.done()
        model.send("unary", 1, is_final=True)
        model.send("streamed", 2, is_final=True)
        assert (await unary).id == "unary"
        assert (await stream.read()).infer_response.id == "streamed"
        await stopping
        assert not model.cancelled


@on_both_servers
async def test_what_is_left_after_the_grace_is_cancelled() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        unary = asyncio.ensure_future(failure(_infer(running.stub, "unary")))
        stream = running.stub.ModelStreamInfer()
        await stream.write(infer_request("held", 1, id="streamed"))
        await model.until(lambda: len(model.jobs) == 2)
        await running.server.stop(0.05)
        await model.until(lambda: sorted(model.cancelled) == ["streamed", "unary"])
        assert (await unary)[0] in ("UNAVAILABLE", "CANCELLED")


async def _infer(stub: Any, request_id: str) -> Any:
    return await stub.ModelInfer(infer_request("held", 1, id=request_id))
