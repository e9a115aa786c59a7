"""The gRPC server: Triton's service, grpc.health.v1 and reflection on one port."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from sluice.addresses import host_and_port
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.call import GrpcCall
from sluice.gateway.api.v2.grpc.control import HEALTH_SERVICE, ExtensionCalls, HealthService, RepositoryCalls
from sluice.gateway.api.v2.grpc.http2_server import MAX_MESSAGE_BYTES, CallServer
from sluice.gateway.api.v2.grpc.infer import InferReader, ModelInfer
from sluice.gateway.api.v2.grpc.messages import WireMessage, join_message
from sluice.gateway.api.v2.grpc.methods import (
    SERVICE,
    CallDetails,
    Methods,
    abort,
    as_sluice_error,
    raw_handler,
    service_handlers,
)
from sluice.gateway.api.v2.grpc.stream import InferStream
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.listeners import ListenError
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.options.grpc import GrpcOptions

_REFLECTION_SERVICES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
"""Under its first name, and under that of its second version, whose messages are the same on the wire."""


class GrpcioServer:
    """The plain server of the `grpc` package, with which tests compare our own (`--grpc-server grpcio`)."""

    def __init__(self, methods: Methods, options: GrpcOptions, host: str) -> None:
        self._options = options
        self._host = host
        self._server = grpc.aio.server(interceptors=[_MethodFinder(methods)], options=_channel_options(options))

    async def start(self) -> int:
        """Listen, and return the port. Raises ListenError for a taken port."""
        target = host_and_port(self._host, self._options.port)
        try:
            port = self._server.add_insecure_port(target)
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


class _ContextWriter:
    """Writes messages to a context of the `grpc` package, as a `GrpcCall` does of itself."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._unwritten: WireMessage | None = None

    def take(self, message: WireMessage) -> bool:
        self._unwritten = message
        return False

    async def ready(self) -> None:
        if self._unwritten is not None:
            message, self._unwritten = self._unwritten, None
            await self._context.write(message)


class _MethodFinder(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        return self._methods.find(CallDetails(details.method, details.invocation_metadata or ()))


def _channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    """Return the settings of gRPC's core, by its own names; -1 is no limit."""
    return [
        ("grpc.so_reuseport", int(options.shares_port)),
        ("grpc.max_receive_message_length", min(options.max_input_bytes, MAX_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", -1),
    ]


class GrpcServer:
    """Serves `server` from `start` on. Lives on the event loop's thread."""

    def __init__(
        self, server: V2Server, options: GrpcOptions, host: str, session_headers: tuple[str, ...] = ()
    ) -> None:
        """`host` is the address to listen on where the options name none, `session_headers` the names of metadata that
        name a request's session."""
        self._health = HealthService(server)
        self._reader = InferReader(server, options.header_forward_pattern, session_headers)
        self._infer = ModelInfer(self._reader)
        self._streams: set[InferStream] = set()
        self._is_stopping = False
        direct = {f"/{SERVICE}/ModelInfer": self._infer.begin}
        methods = Methods(
            self._handlers(server), direct, server.calls, Restrictions(options.restrictions), server.tracer
        )
        kind = GrpcioServer if options.server == "grpcio" else CallServer
        self._server: GrpcioServer | CallServer = kind(methods, options, options.host or host)

    async def start(self) -> int:
        """Listen, and return the port. Raises OptionError for unreadable TLS files, ListenError for a taken port."""
        return await self._server.start()

    def begin_stop(self) -> None:
        """Report NOT_SERVING, and end each stream with UNAVAILABLE once its requests are answered. Idempotent.

        New calls are still taken, for the server to refuse.
        """
        self._is_stopping = True
        self._health.stop()
        for stream in list(self._streams):
            stream.finish(_shutting_down())

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and let those in flight go on for up to `grace_s`; then cancel the rest."""
        self.begin_stop()
        await self._server.stop(grace_s)

    def _handlers(self, server: V2Server) -> dict[str, Any]:
        inference = {
            **RepositoryCalls(server).handlers(),
            **ExtensionCalls(server).handlers(),
            "ModelInfer": raw_handler("ModelInfer", self._infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                self._serve_stream, response_serializer=join_message
            ),
        }
        handlers = service_handlers(SERVICE, inference) | service_handlers(HEALTH_SERVICE, self._health.handlers())
        for name in _REFLECTION_SERVICES:
            handlers |= service_handlers(name, {"ServerReflectionInfo": _reflection_handler()})
        return handlers

    async def _serve_stream(self, requests: Any, context: Any) -> None:
        writer = context if isinstance(context, GrpcCall) else _ContextWriter(context)
        stream = InferStream(self._reader, context, writer)
        self._streams.add(stream)
        try:
            if self._is_stopping:
                raise _shutting_down()
            with ending_with_key():
                await stream.run()
        except Exception as error:
            await abort(context, as_sluice_error(error, "ModelStreamInfer"))
        finally:
            self._streams.discard(stream)


def _reflection_handler() -> Any:
    servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME))
    return grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )


def _shutting_down() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
