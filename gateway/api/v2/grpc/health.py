"""grpc.health.v1: whether the server and its models answer."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from sluice.gateway.api.v2.grpc.messages import parse_message
from sluice.gateway.api.v2.grpc.unary import sync_handler
from sluice.gateway.api.v2.server import V2Server
from sluice.serving.request import LATEST

HEALTH_SERVICE = "grpc.health.v1.Health"
_WATCH_PERIOD_S = 0.5
"""Seconds between looks at a watched state: nothing announces its changes."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthService:
    """Answers grpc.health.v1 for probes and load balancers: of a model by its name, of the server by any other."""

    def __init__(self, server: V2Server) -> None:
        self._server = server
        self._stopping = asyncio.Event()

    def handlers(self) -> dict[str, Any]:
        """Return the handlers of its methods by name."""
        return {
            "Check": sync_handler("Check", health_pb2.HealthCheckRequest, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }

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
        is_model = name in {model.name for model in self._server.repository.models()}
        is_ready = self._server.is_model_ready(name, LATEST) if is_model else self._server.health.is_ready()
        return _SERVING if is_ready else _NOT_SERVING
