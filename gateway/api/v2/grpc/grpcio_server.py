"""The plain server of the `grpc` package, with which tests compare our own: `--grpc-server grpcio`."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from sluice.addresses import host_and_port
from sluice.gateway.api.v2.grpc.methods import CallDetails, Methods
from sluice.gateway.front.listeners import ListenError
from sluice.gateway.options.grpc import GrpcOptions

_MAX_MESSAGE_BYTES = 2**31 - 1


class GrpcioServer:
    """Serves `methods`. Lives on the event loop's thread."""

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


class _MethodFinder(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        return self._methods.find(CallDetails(details.method, details.invocation_metadata or ()))


def _channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    """Return the settings of gRPC's core, by its own names; -1 is no limit."""
    return [
        ("grpc.so_reuseport", int(options.shares_port)),
        ("grpc.max_receive_message_length", min(options.max_input_bytes, _MAX_MESSAGE_BYTES)),
        ("grpc.max_send_message_length", -1),
    ]
