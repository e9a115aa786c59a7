"""Who may call: the key for everybody (metadata `authorization: Bearer KEY`), and restricted parts of the protocol."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.access.restricted import Api, Restrictions
from gateway.grpc.errors import abort
from sluice.errors import ErrorCode, SluiceError

_OPEN_METHODS = frozenset(
    ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady"),
)
_OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
_SERVICE = "/inference.GRPCInferenceService/"
_KEY_PREFIX = "triton-grpc-protocol-"
_APIS = {
    "ServerLive": Api.HEALTH,
    "ServerReady": Api.HEALTH,
    "ModelReady": Api.HEALTH,
    "ServerMetadata": Api.METADATA,
    "ModelMetadata": Api.METADATA,
    "ModelInfer": Api.INFERENCE,
    "ModelStreamInfer": Api.INFERENCE,
    "ModelConfig": Api.MODEL_CONFIG,
    "ModelStatistics": Api.STATISTICS,
    "RepositoryIndex": Api.MODEL_REPOSITORY,
    "RepositoryModelLoad": Api.MODEL_REPOSITORY,
    "RepositoryModelUnload": Api.MODEL_REPOSITORY,
    "SystemSharedMemoryStatus": Api.SHARED_MEMORY,
    "SystemSharedMemoryRegister": Api.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": Api.SHARED_MEMORY,
    "CudaSharedMemoryStatus": Api.SHARED_MEMORY,
    "CudaSharedMemoryRegister": Api.SHARED_MEMORY,
    "CudaSharedMemoryUnregister": Api.SHARED_MEMORY,
    "TraceSetting": Api.TRACE,
    "LogSettings": Api.LOGGING,
}
"""By method of the service."""


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


class RestrictedProtocolInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls to restricted parts of the protocol that lack their metadata, as permission denied."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The call's own handler, or one that refuses it in Triton's words."""
        restriction = self._restrictions.of(_api_of(details.method))
        if restriction is None:
            return await continuation(details)
        name = _KEY_PREFIX + restriction.key
        given = dict(details.invocation_metadata or ()).get(name)
        if restriction.admits(given):
            return await continuation(details)
        return _refuse(SluiceError(ErrorCode.FORBIDDEN, f"This protocol is restricted, expecting header '{name}'"))


def _api_of(method: str) -> Api | None:
    if method.startswith("/grpc.health."):
        return Api.HEALTH
    return _APIS.get(method.removeprefix(_SERVICE))


def _refuse(refusal: SluiceError) -> Any:
    async def serve(requests: Any, context: Any) -> None:
        await abort(context, refusal)

    # Of a stream's kind, so that nothing is read first; unary clients see the status alike.
    return grpc.stream_stream_rpc_method_handler(serve)


def _unauthenticated(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAUTHENTICATED, message)
