"""What TLS the server takes, and from whom."""

import asyncio
import socket
import ssl

import grpc
import pytest
from h2.errors import ErrorCodes as Code

from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.http2.calls import ECHO, serving_calls
from tests.gateway.api.v2.grpc.http2.client import PREFACE, connected, settings
from tests.paths import CERTIFICATES
from tests.waiting import PATIENCE_S, until

CIPHERS = ("ECDHE-ECDSA-AES128-SHA256", "ECDHE-ECDSA-AES256-SHA")
"""That the key of the certificate would allow."""
TLS_VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def options(*, is_mutual: bool = False) -> GrpcOptions:
    return GrpcOptions(
        port=0,
        uses_ssl=not is_mutual,
        uses_mutual_ssl=is_mutual,
        server_cert_path=str(CERTIFICATES / "server.pem"),
        server_key_path=str(CERTIFICATES / "server.key"),
        root_cert_path=str(CERTIFICATES / "ca.pem"),
        http2_max_ping_strikes=0,
    )


def client_context(*protocols: str, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CERTIFICATES / "ca.pem"))
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


@pytest.mark.parametrize("version", TLS_VERSIONS)
async def test_versions(version: ssl.TLSVersion) -> None:
    """A long message and a short one, by TLS of that version."""
    async with (
        serving_calls(options()) as calls,
        connected(calls.port, tls=client_context("http/1.1", "h2", version=version)) as client,
    ):
        assert (await client.ask(1)).messages == [b"hello"]
        client.gives_windows = True
        assert (await client.ask(3, "/test/Large", b"1000000")).messages == [bytes(1_000_000)]


async def is_refused(port: int, context: ssl.SSLContext) -> bool:
    """Say whether the server closes before it has spoken HTTP/2. The client itself must have nothing against it."""

    def connect() -> bool:
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall(PREFACE + settings())
            return secure.recv(1) == b""  # in TLS 1.3 a client hears of the end behind the handshake

    try:
        return await asyncio.to_thread(connect)
    except ConnectionError:
        return True
    except ssl.SSLError as error:
        assert "EOF" in error.reason or "ALERT" in error.reason, error
        return True


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
async def test_older_versions_are_refused() -> None:
    context = client_context("h2", version=ssl.TLSVersion.TLSv1_1)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # else the client itself would not try
    async with serving_calls(options()) as calls:
        assert await is_refused(calls.port, context)


async def test_weak_ciphers_are_refused() -> None:
    """RFC 9113, section 9.2.2, forbids those without an ephemeral key or an AEAD."""
    async with serving_calls(options()) as calls:
        for cipher in CIPHERS:
            context = client_context("h2", version=ssl.TLSVersion.TLSv1_2)
            context.set_ciphers(cipher)
            assert await is_refused(calls.port, context)


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)], ids=["none", "HTTP/1.1 alone"])
async def test_http2_needs_its_name_in_alpn(protocols: tuple[str, ...]) -> None:
    async with (
        serving_calls(options()) as calls,
        connected(calls.port, tls=client_context(*protocols), sends_preface=False) as client,
    ):
        client.send(PREFACE, settings())
        await client.until_closed()
        [(_, code, text)] = client.goaways
        assert (Code(code), text) == (Code.INADEQUATE_SECURITY, "HTTP/2 over TLS needs the protocol h2 in ALPN")


async def test_http1_over_tls_gets_a_sentence() -> None:
    async with (
        serving_calls(options()) as calls,
        connected(calls.port, tls=client_context("http/1.1"), sends_preface=False) as client,
    ):
        client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await client.until_closed()
        assert client.raw.startswith(b"HTTP/1.1 505 ")


async def test_a_client_without_tls_gets_nothing() -> None:
    async with serving_calls(options()) as calls:
        async with connected(calls.port) as client:
            await client.until_closed()
            assert not client.settings
        async with connected(calls.port, tls=client_context("h2")) as other:
            assert (await other.ask(1)).status == 0


@pytest.mark.parametrize("version", TLS_VERSIONS)
async def test_mutual_tls(version: ssl.TLSVersion) -> None:
    context = client_context("h2", version=version)
    async with serving_calls(options(is_mutual=True)) as calls:
        assert await is_refused(calls.port, context)
        context.load_cert_chain(CERTIFICATES / "client.pem", CERTIFICATES / "client.key")
        async with connected(calls.port, tls=context) as client:
            assert (await client.ask(1)).messages == [b"hello"]
        assert not await is_refused(calls.port, context)


async def test_a_handshake_that_never_ends_stops_nobody() -> None:
    async with serving_calls(options()) as calls, connected(calls.port, sends_preface=False, reads=False) as mute:
        mute.send(b"\x16\x03\x01\x02\x00\x01")
        credentials = grpc.ssl_channel_credentials((CERTIFICATES / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{calls.port}", credentials) as channel:
            assert await channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S) == b"x"


async def test_a_client_that_leaves_during_a_response_over_tls() -> None:
    async with serving_calls(options()) as calls:
        async with connected(calls.port, tls=client_context("h2")) as client:
            client.send(client.request(1, "/test/Large", b"1000000"))
            await client.until(lambda: bool(client.stream(1).data))
        await until(lambda: not calls.server.connections)
        await calls.until_idle()
