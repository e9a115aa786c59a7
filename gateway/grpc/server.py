"""The gRPC server: Triton's service, grpc.health.v1 and reflection on one port."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from gateway.grpc.access import ApiKeyInterceptor, RestrictedProtocolInterceptor
from gateway.grpc.control import ExtensionCalls, RepositoryCalls
from gateway.grpc.infer import InferReader, ModelInfer
from gateway.grpc.messages import parse_message
from gateway.grpc.stream import InferStream
from gateway.grpc.unary import abort, as_sluice_error, raw_handler, sync_handler
from gateway.options.grpc import GrpcOptions
from gateway.options.option import OptionError
from gateway.restrictions import Restrictions
from gateway.v2.server import V2Service
from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError

HEALTH_SERVICE = "grpc.health.v1.Health"
_SERVICE = "inference.GRPCInferenceService"
_MAX_MESSAGE_BYTES = 2**31 - 1
_WATCH_PERIOD_S = 0.5
"""Seconds between looks at a watched state: nothing announces its changes."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}


class GrpcServer:
    """Serves `service` from `start` on. Lives on the event loop's thread."""

    def __init__(self, service: V2Service, options: GrpcOptions, host: str, api_key: str | None = None) -> None:
        """`host` is the address to listen on where the options name none."""
        self._options = options
        self._host = options.host or host
        self._health = HealthService(service)
        self._reader = InferReader(service, options.header_forward_pattern)
        self._streams: set[InferStream] = set()
        self._is_stopping = False
        self._server = grpc.aio.server(
            handlers=[self._inference(service), self._health.handler()],
            interceptors=_interceptors(api_key, Restrictions(options.restrictions)),
            options=channel_options(options),
        )
        reflection.enable_server_reflection((_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen, and return the port. Raises OptionError for unreadable TLS files, OSError for a taken port."""
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
        """Report NOT_SERVING, and end each stream with UNAVAILABLE once its requests are answered. Idempotent.

        New calls are still taken, for the service to refuse.
        """
        self._is_stopping = True
        self._health.stop()
        for stream in list(self._streams):
            stream.finish(_shutting_down())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those in flight go on for up to `grace_s`; then cancel the rest.

        A call that comes in this moment ends as CANCELLED, which clients do not retry: call `begin_stop` some time
        before, so that they know.
        """
        self.begin_stop()
        await self._server.stop(grace_s)

    def _inference(self, service: V2Service) -> "grpc.GenericRpcHandler":
        methods = {
            **RepositoryCalls(service).handlers(),
            **ExtensionCalls(service).handlers(),
            "ModelInfer": raw_handler("ModelInfer", ModelInfer(self._reader)),
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


def _shutting_down() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)


class HealthService:
    """Answers grpc.health.v1 for probes and load balancers: of a model by its name, of the server by any other."""

    def __init__(self, service: V2Service) -> None:
        self._service = service
        self._stopping = asyncio.Event()

    def handler(self) -> "grpc.GenericRpcHandler":
        methods = {
            "Check": sync_handler("Check", health_pb2.HealthCheckRequest, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def stop(self) -> None:
        """Report NOT_SERVING from here on, and end the watches."""
        self._stopping.set()

    def check(self, request: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, raw: bytes, context: Any) -> None:
        """Send the state now, and each change of it."""
        request = parse_message(health_pb2.HealthCheckRequest, raw)
        sent: Any = None
        while True:
            is_last = self._stopping.is_set()  # before the write: a stop during it is still to be sent
            status = self._status(request.service)
            if status != sent:
                sent = status
                await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
            if is_last:
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), _WATCH_PERIOD_S)
            except TimeoutError:
                continue

    def _status(self, name: str) -> Any:
        """Return the state of a model or the server. As in Triton, unknown names stand for the server."""
        if self._stopping.is_set():
            return _NOT_SERVING
        is_model = name in {model.name for model in self._service.repository.models()}
        is_ready = self._service.is_model_ready(name, LATEST) if is_model else self._service.is_ready()
        return _SERVING if is_ready else _NOT_SERVING
