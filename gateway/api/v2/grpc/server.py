"""The gRPC server: Triton's service, grpc.health.v1 and reflection on one port."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.control import ExtensionCalls, RepositoryCalls
from sluice.gateway.api.v2.grpc.grpcio_server import GrpcioServer
from sluice.gateway.api.v2.grpc.health import HEALTH_SERVICE, HealthService
from sluice.gateway.api.v2.grpc.http2_server import CallServer
from sluice.gateway.api.v2.grpc.infer import InferReader, ModelInfer
from sluice.gateway.api.v2.grpc.messages import join_message
from sluice.gateway.api.v2.grpc.methods import Methods, service_handlers
from sluice.gateway.api.v2.grpc.stream import InferStream
from sluice.gateway.api.v2.grpc.unary import abort, as_sluice_error, raw_handler
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.restrictions import Restrictions
from sluice.gateway.options.grpc import GrpcOptions

_SERVICE = "inference.GRPCInferenceService"
_REFLECTION_SERVICES = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
"""Under its first name, and under that of its second version, whose messages are the same on the wire."""


class _Server(Protocol):
    async def start(self) -> int: ...

    async def stop(self, grace_s: float) -> None: ...


class GrpcServer:
    """Serves `server` from `start` on. Lives on the event loop's thread."""

    def __init__(self, server: V2Server, options: GrpcOptions, host: str, session_headers: Sequence[str] = ()) -> None:
        """`host` is the address to listen on where the options name none, `session_headers` the names of metadata that
        name a request's session."""
        self._health = HealthService(server)
        self._reader = InferReader(server, options.header_forward_pattern, session_headers)
        self._infer = ModelInfer(self._reader)
        self._streams: set[InferStream] = set()
        self._is_stopping = False
        direct = {f"/{_SERVICE}/ModelInfer": self._infer}
        methods = Methods(
            self._handlers(server), direct, server.calls, Restrictions(options.restrictions), server.tracer
        )
        kind = GrpcioServer if options.server == "grpcio" else CallServer
        self._server: _Server = kind(methods, options, options.host or host)

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
        handlers = service_handlers(_SERVICE, inference) | service_handlers(HEALTH_SERVICE, self._health.handlers())
        for name in _REFLECTION_SERVICES:
            handlers |= service_handlers(name, {"ServerReflectionInfo": _reflection_handler()})
        return handlers

    async def _serve_stream(self, requests: Any, context: Any) -> None:
        stream = InferStream(self._reader, context)
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
    servicer = reflection.aio.ReflectionServicer((_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME))
    return grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )


def _shutting_down() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down", retry_after_s=1.0)
