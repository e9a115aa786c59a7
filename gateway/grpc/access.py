"""One key for everybody: metadata `authorization: Bearer KEY`, asked of every call but the probes."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from engine.errors import ErrorCode, SluiceError
from gateway.grpc.errors import abort

_OPEN_METHODS = frozenset(
    ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"),
)
_OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls without the key as unauthenticated, before anything of them is read."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key.encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The call's own handler, or one that refuses it."""
        method = details.method
        if method in _OPEN_METHODS or method.startswith(_OPEN_SERVICES):
            return await continuation(details)
        refusal = self._check(dict(details.invocation_metadata or ()).get("authorization"))
        return await continuation(details) if refusal is None else _refuse(refusal)

    def _check(self, value: str | None) -> SluiceError | None:
        """Why a call with this metadata is refused. Never repeats what came."""
        if value is None:
            return _unauthenticated("this server asks for an API key: send the metadata 'authorization: Bearer KEY'")
        scheme, _, key = value.partition(" ")
        if scheme.lower() != "bearer":
            return _unauthenticated("the authorization metadata must read 'Bearer KEY'")
        if not hmac.compare_digest(key.strip().encode(), self._key):
            return _unauthenticated("the API key is wrong")
        return None


def _refuse(refusal: SluiceError) -> Any:
    async def serve(requests: Any, context: Any) -> None:
        await abort(context, refusal)

    # Of a stream's kind, so that nothing is read first; unary clients see the status alike.
    return grpc.stream_stream_rpc_method_handler(serve)


def _unauthenticated(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAUTHENTICATED, message)
