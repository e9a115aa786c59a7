"""The gRPC server: Triton's service, health and reflection on one port."""

from pathlib import Path
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from gateway.access.restricted import Restrictions
from gateway.grpc import health
from gateway.grpc.access import ApiKeyInterceptor, RestrictedProtocolInterceptor
from gateway.grpc.errors import abort, as_sluice_error
from gateway.grpc.infer import InferReader, ModelInfer
from gateway.grpc.models import ModelCalls
from gateway.grpc.settings import SettingCalls
from gateway.grpc.stream import InferStream
from gateway.grpc.unary import unary
from gateway.options.grpc import GrpcOptions
from gateway.options.option import ConfigError
from gateway.v2.service import Service
from sluice.errors import ErrorCode, SluiceError

_SERVICE = "inference.GRPCInferenceService"
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


class GrpcServer:
    """Serves `service` from `start` on. Lives on the event loop's thread."""

    def __init__(self, service: Service, options: GrpcOptions, host: str, api_key: str | None = None) -> None:
        """`host` is where to listen if the options do not say."""
        self._options = options
        self._host = options.host or host
        self._health = health.Health(service)
        self._reader = InferReader(service, options.header_forward_pattern)
        self._streams: set[InferStream] = set()
        self._is_stopping = False
        self._server = grpc.aio.server(
            handlers=[self._inference(service), self._health.handler()],
            interceptors=_interceptors(api_key, Restrictions(options.restrictions)),
            options=channel_options(options),
        )
        reflection.enable_server_reflection((_SERVICE, health.NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen, and say on which port. Raises ConfigError for files that make no TLS, OSError for a taken port."""
        address = f"[{self._host}]" if ":" in self._host else self._host
        target = f"{address}:{self._options.port}"
        credentials = server_credentials(self._options)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {target} for gRPC: {error}") from None
        await self._server.start()
        return int(port)

    def begin_stop(self) -> None:
        """Say NOT_SERVING, and end streams with UNAVAILABLE once what they have asked for is answered. Idempotent.

        New calls are still taken, for the service to refuse.
        """
        self._is_stopping = True
        self._health.stop()
        for stream in list(self._streams):
            stream.finish(_shutting_down())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those under way go on for up to `grace_s`; whatever is left then is cancelled.

        A call that comes in this moment ends as CANCELLED, which clients do not try again: call `begin_stop` some time
        before, so that they have heard of it.
        """
        self.begin_stop()
        await self._server.stop(grace_s)

    def _inference(self, service: Service) -> "grpc.GenericRpcHandler":
        methods = {
            **ModelCalls(service).handlers(),
            **SettingCalls(service).handlers(),
            "ModelInfer": unary("ModelInfer", ModelInfer(self._reader)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._serve_stream),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    async def _serve_stream(self, requests: Any, context: Any) -> None:
        stream = InferStream(self._reader, context)
        self._streams.add(stream)
        try:
            if self._is_stopping:
                raise _shutting_down()
            await stream.run()
        except Exception as error:
            await abort(context, as_sluice_error(error, "ModelStreamInfer"))
        finally:
            self._streams.discard(stream)


def _interceptors(api_key: str | None, restrictions: Restrictions) -> "list[grpc.aio.ServerInterceptor] | None":
    chosen: list[grpc.aio.ServerInterceptor] = []
    if api_key is not None:
        chosen.append(ApiKeyInterceptor(api_key))
    if restrictions:
        chosen.append(RestrictedProtocolInterceptor(restrictions))
    return chosen or None


def channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    """What gRPC's core is told; its own names, and its -1 for no limit."""
    chosen: dict[str, int | None] = {
        "grpc.so_reuseport": int(options.shares_port),
        "grpc.max_receive_message_length": options.max_input_bytes or -1,
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
    """TLS as the options ask for it; None for none. Raises ConfigError for a file that cannot be read."""
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
        raise ConfigError(f"{flag} cannot be read: {error}") from None


def _shutting_down() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
