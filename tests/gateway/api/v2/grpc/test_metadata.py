"""What calls carry beside their messages, with stock clients, on either server."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from sluice.gateway.api.v2.grpc.http2_server import CallServer
from sluice.gateway.api.v2.grpc.methods import Methods, parse_peer
from sluice.gateway.api.v2.grpc.server import GrpcioServer
from sluice.gateway.calls import CallLog
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.parts import on_both_servers, serving
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

CALL, STREAM = "/test/Call", "/test/Stream"
pytestmark = on_both_servers


@asynccontextmanager
async def answering(server_name: str, serve: Any, host: str = "127.0.0.1") -> AsyncIterator[Any]:
    """A server of CALL and STREAM, which `serve` answers, and a channel to it."""

    async def serve_stream(requests: Any, context: Any) -> None:
        await context.read()
        await serve(b"", context)

    handlers: Mapping[str, Any] = {
        CALL: grpc.unary_unary_rpc_method_handler(serve),
        STREAM: grpc.stream_stream_rpc_method_handler(serve_stream),
    }
    kind = GrpcioServer if server_name == "grpcio" else CallServer
    server = kind(Methods(handlers, {}, CallLog(), Restrictions(())), GrpcOptions(port=0), host)
    port = await server.start()
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_metadata_of_requests(server_name: str) -> None:
    found: list[Any] = []

    async def note(raw: bytes, context: Any) -> bytes:
        found.extend(context.invocation_metadata())
        return b""

    given = (("x-a", "1"), ("x-a", "2"), ("x-bin", b"\0\xff"), ("x-bin", b""), ("x-long", "v" * 3000))
    async with answering(server_name, note) as channel:
        for _ in range(3):  # by the table, from the second on
            found.clear()
            await channel.unary_unary(CALL)(b"", metadata=given, timeout=PATIENCE_S)
            assert [each for each in found if each[0] != "user-agent"] == list(given)
            assert [name for name, _ in found].count("user-agent") == 1


@pytest.mark.parametrize("path", [CALL, STREAM])
async def test_metadata_behind_a_status(server_name: str, path: str) -> None:
    details = bytes(range(256)) * 4
    given = (("x-why", "because"), ("grpc-status-details-bin", details), ("x-why", "again"))

    async def fail(raw: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nö: 日本 100 %\n", given)
        return b""

    async with answering(server_name, fail) as channel:
        method = channel.unary_unary(path) if path == CALL else channel.stream_stream(path)
        call = method(b"", timeout=PATIENCE_S) if path == CALL else method(iter([b""]), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as caught:
            await (call if path == CALL else call.read())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "nö: 日本 100 %\n"
        trailing = await call.trailing_metadata()
        assert sorted(each for each in trailing if each[0] != "content-type") == sorted(given)


async def test_a_very_long_text_reaches_the_client(server_name: str) -> None:
    """grpc's clients refuse header fields of more than 8 KiB now and then, and of 16 KiB always."""
    if server_name == "grpcio":
        pytest.skip("its texts are as long as they are")

    async def fail(raw: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, bytes(raw).decode() * 20_000)
        return b""

    async with answering(server_name, fail) as channel:
        for letter in ("x", "é", "語", "😀"):
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(CALL)(letter.encode(), timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            found = caught.value.details()
            assert found.endswith("...") and set(found.removesuffix("...")) == {letter}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_client_s_address(server_name: str, host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")

    async def name(raw: bytes, context: Any) -> bytes:
        peer: str = context.peer()
        return peer.encode()

    async with answering(server_name, name, host) as channel:
        peer = (await channel.unary_unary(CALL)(b"", timeout=PATIENCE_S)).decode()
        assert peer.startswith("ipv4:127.0.0.1:" if host == "127.0.0.1" else "ipv6:%5B::1%5D:")
        assert parse_peer(peer) == host


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_in_both_versions(version: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with serving(SmallService()) as running:
        method = running.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        [found] = [each async for each in method(iter([request]), timeout=PATIENCE_S)]
        assert "inference.GRPCInferenceService" in [each.name for each in found.list_services_response.service]
