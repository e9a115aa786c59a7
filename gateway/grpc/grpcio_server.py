"""The server of the `grpc` package, for comparison: `--grpc-server grpcio`."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from sluice.addresses import host_and_port
from sluice.gateway.grpc.methods import CallDetails, Methods
from sluice.gateway.listeners import ListenError
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.options.option import OptionError

_MAX_MESSAGE_BYTES = 2**31 - 1
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


class GrpcioServer:
    """Serves `methods`. Lives on the event loop's thread."""

    def __init__(self, methods: Methods, options: GrpcOptions, host: str) -> None:
        self._options = options
        self._host = host
        self._server = grpc.aio.server(interceptors=[_MethodFinder(methods)], options=channel_options(options))

    async def start(self) -> int:
        """Listen, and return the port. Raises OptionError for unreadable TLS files, ListenError for a taken port."""
        target = host_and_port(self._host, self._options.port)
        credentials = server_credentials(self._options)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:
            text = f"cannot listen on {target} for gRPC: {error}; choose another with --grpc-port (0 takes a free one)"
            raise ListenError(text) from None
        await self._server.start()
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those in flight go on for up to `grace_s`; then cancel the rest.

        A call that comes in this moment ends as CANCELLED, which clients do not retry.
        """
        await self._server.stop(grace_s)


class _MethodFinder(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        return self._methods.find(CallDetails(details.method, details.invocation_metadata or ()))


def channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    """Return the settings of gRPC's core, by its own names; -1 is no limit."""
    chosen: dict[str, int | None] = {
        "grpc.so_reuseport": int(options.shares_port),
        "grpc.max_receive_message_length": min(options.max_input_bytes, _MAX_MESSAGE_BYTES),
        "grpc.max_send_message_length": -1,
        "grpc.default_compression_level": _COMPRESSION_LEVELS[options.compression_level] or None,
        "grpc.keepalive_time_ms": options.keepalive_time_ms,
        "grpc.keepalive_timeout_ms": options.keepalive_timeout_ms,
        "grpc.keepalive_permit_without_calls": int(options.keepalive_permit_without_calls),
        "grpc.http2.max_pings_without_data": options.http2_max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": options.http2_min_recv_ping_interval_ms,
        "grpc.http2.max_ping_strikes": options.http2_max_ping_strikes,
        "grpc.max_connection_age_ms": options.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": options.max_connection_age_grace_ms,
    }
    return [(name, value) for name, value in chosen.items() if value is not None]


def server_credentials(options: GrpcOptions) -> "grpc.ServerCredentials | None":
    """Return TLS credentials as the options say; None without TLS. Raises OptionError for an unreadable file."""
    if not (options.uses_ssl or options.uses_mutual_ssl):
        return None
    pair = (_pem("--grpc-server-key", options.server_key_path), _pem("--grpc-server-cert", options.server_cert_path))
    root = _pem("--grpc-root-cert", options.root_cert_path) if options.uses_mutual_ssl else None
    return grpc.ssl_server_credentials([pair], root, require_client_auth=options.uses_mutual_ssl)


def _pem(flag: str, path: str | None) -> bytes:
    assert path is not None, "GrpcOptions checks it"
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{flag} cannot be read: {error}") from None
