"""The server of gRPC's calls on asyncio: Sluice's own, which a call costs a fifth of what it costs the library's."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

from sluice.gateway.api.v2.grpc import wire
from sluice.gateway.api.v2.grpc.call import CallHost, GrpcCall
from sluice.gateway.api.v2.grpc.methods import Methods
from sluice.gateway.api.v2.grpc.wire import LEVELS
from sluice.gateway.front.http2.connection import Http2Connection
from sluice.gateway.front.http2.frames import Fields
from sluice.gateway.front.http2.pings import PingRules
from sluice.gateway.front.listeners import listen
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.options.option import OptionError

MAX_MESSAGE_BYTES = 2**31 - 1
_HTTP1_TEXT = "This port speaks gRPC over HTTP/2. HTTP/1.1 is spoken on the port of --http-port.\n"
_HTTP1_ANSWER = (
    "HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\n"
    f"content-length: {len(_HTTP1_TEXT)}\r\nconnection: close\r\n\r\n{_HTTP1_TEXT}"
).encode()
_CLOSE_S = 1.0
"""Longest time that the last frames may take to leave."""
_HANDSHAKE_S = 20.0
_LINE_BYTES = 512
"""Bytes among which a request line of HTTP/1 shows itself."""


class CallServer:
    """Serves `methods`. Lives on the event loop's thread."""

    def __init__(self, methods: Methods, options: GrpcOptions, host: str) -> None:
        self.ping_rules = _ping_rules(options)
        self._options = options
        self._host = host
        self.connections: set[Http2Connection[wire.CallHead]] = set()
        """Open connections."""
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()
        max_bytes = min(options.max_input_bytes, MAX_MESSAGE_BYTES)
        self.calls = CallHost(methods, max_bytes, LEVELS[options.compression_level], self._changed.set)

    async def start(self) -> int:
        """Listen, and return the port. Raises OptionError for unreadable TLS files, OSError for a taken port."""
        context = make_tls_context(self._options)
        options, loop = self._options, asyncio.get_running_loop()
        listener = listen(
            self._host,
            options.port,
            "--grpc-port",
            shares_port=options.shares_port,
            host_flag="--grpc-address" if options.host else "--host",
        )
        self._server = await loop.create_server(
            lambda: Http2Connection(self, loop),
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
        )
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those in flight go on for up to `grace_s`; then cancel the rest."""
        if self._server is None:
            return
        self._server.close()
        for each in list(self.connections):
            each.pings.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._wait_until_alone()
        except TimeoutError:
            await self._drop()

    async def _wait_until_alone(self) -> None:
        while self.connections or self.calls.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def _drop(self) -> None:
        for connection in list(self.connections):
            for call in list(connection.streams.values()):
                assert isinstance(call, GrpcCall)
                call.stop()
            connection.close()
        if self.calls.tasks:
            await asyncio.wait(self.calls.tasks)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._wait_until_alone()
        for connection in list(self.connections):
            connection.transport.abort()  # its client reads nothing

    # --- what connections ask ---

    def read_fields(self, fields: Fields) -> wire.CallHead:
        """Parse a call's head. Raises ValueError."""
        return wire.parse_head(fields)

    def open(
        self, connection: Http2Connection[wire.CallHead], stream_id: int, made: wire.CallHead, is_received: bool
    ) -> GrpcCall:
        """Begin a call."""
        call = GrpcCall(connection, stream_id, made, self.calls)
        call.is_received = is_received
        connection.streams[stream_id] = call
        call.begin()
        return call

    def add(self, connection: Http2Connection[wire.CallHead]) -> None:
        self.connections.add(connection)

    def discard(self, connection: Http2Connection[wire.CallHead]) -> None:
        self.connections.discard(connection)
        self._changed.set()

    def answer_http1(self, request: bytes) -> bytes:
        """Return what a client of HTTP/1 gets; nothing for one that speaks neither."""
        return _HTTP1_ANSWER if b" HTTP/1." in request[:_LINE_BYTES] else b""


def _ping_rules(options: GrpcOptions) -> PingRules:
    def seconds(value: int | None) -> float | None:
        return None if value is None else value / 1000

    return PingRules(
        time_s=options.keepalive_time_ms / 1000,
        timeout_s=options.keepalive_timeout_ms / 1000,
        permits_without_calls=options.keepalive_permit_without_calls,
        max_without_data=options.http2_max_pings_without_data,
        min_received_interval_s=options.http2_min_recv_ping_interval_ms / 1000,
        max_strikes=options.http2_max_ping_strikes,
        max_age_s=seconds(options.max_connection_age_ms),
        max_age_grace_s=seconds(options.max_connection_age_grace_ms),
    )


def make_tls_context(options: GrpcOptions) -> ssl.SSLContext | None:
    """Return TLS as the options say, for HTTP/2 alone; None without. Raises OptionError for an unreadable file."""
    if not (options.uses_ssl or options.uses_mutual_ssl):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # of TLS 1.2, those that RFC 9113 does not forbid
    context.set_alpn_protocols(["h2"])
    certificate = _readable("--grpc-server-cert", options.server_cert_path)
    key = _readable("--grpc-server-key", options.server_key_path)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        text = f"--grpc-server-cert and --grpc-server-key are not a certificate and its key in PEM: {error.reason}"
        raise OptionError(text) from None
    if options.uses_mutual_ssl:
        roots = _readable("--grpc-root-cert", options.root_cert_path)
        try:
            context.load_verify_locations(roots)
        except ssl.SSLError as error:
            raise OptionError(f"--grpc-root-cert has no certificates in PEM: {error.reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _readable(flag: str, path: str | None) -> str:
    assert path is not None, "GrpcOptions checks it"
    try:
        with Path(path).open("rb"):
            return path
    except OSError as error:
        raise OptionError(f"{flag} cannot be read: {error}") from None
