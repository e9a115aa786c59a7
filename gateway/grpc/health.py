"""grpc.health.v1: how probes and load balancers of gRPC ask."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from gateway.grpc.infer import parse
from gateway.grpc.unary import simple
from gateway.v2.service import Service
from serving.request import LATEST

NAME = "grpc.health.v1.Health"
_WATCH_PERIOD_S = 0.5
"""How often a watched state is looked at; nothing announces a change of it."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Answers for the server, whatever service of it is named, and for a model by the model's name."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopping = asyncio.Event()

    def handler(self) -> "grpc.GenericRpcHandler":
        """Of the whole service."""
        methods = {
            "Check": simple("Check", health_pb2.HealthCheckRequest, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        return grpc.method_handlers_generic_handler(NAME, methods)

    def stop(self) -> None:
        """Say NOT_SERVING from here on, and end what watches."""
        self._stopping.set()

    def check(self, request: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, raw: bytes, context: Any) -> None:
        """The state now, and each change of it."""
        request = parse(health_pb2.HealthCheckRequest, raw)
        said: Any = None
        while True:
            status = self._status(request.service)
            if status != said:
                said = status
                await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
            if self._stopping.is_set():
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), _WATCH_PERIOD_S)
            except TimeoutError:
                continue

    def _status(self, name: str) -> Any:
        """Like Triton, names that it does not know stand for the server."""
        if self._stopping.is_set():
            return _NOT_SERVING
        is_model = name in {model.name for model in self._service.repository.models()}
        is_ready = self._service.is_model_ready(name, LATEST) if is_model else self._service.is_ready()
        return _SERVING if is_ready else _NOT_SERVING
