"""Access over gRPC: one API key for everybody, and metadata for restricted categories of requests."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gateway.grpc.unary import abort
from gateway.restrictions import ApiCategory, Restrictions, check_api_key
from sluice.errors import ErrorCode, SluiceError

_SERVICE = "/inference.GRPCInferenceService/"
_OPEN_METHODS = (f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady")
_OPEN_SERVICE = "/grpc.health."
_KEY_PREFIX = "triton-grpc-protocol-"
API_CATEGORIES = {
    "ServerLive": ApiCategory.HEALTH,
    "ServerReady": ApiCategory.HEALTH,
    "ModelReady": ApiCategory.HEALTH,
    "ServerMetadata": ApiCategory.METADATA,
    "ModelMetadata": ApiCategory.METADATA,
    "ModelInfer": ApiCategory.INFERENCE,
    "ModelStreamInfer": ApiCategory.INFERENCE,
    "ModelConfig": ApiCategory.MODEL_CONFIG,
    "ModelStatistics": ApiCategory.STATISTICS,
    "RepositoryIndex": ApiCategory.MODEL_REPOSITORY,
    "RepositoryModelLoad": ApiCategory.MODEL_REPOSITORY,
    "RepositoryModelUnload": ApiCategory.MODEL_REPOSITORY,
    "SystemSharedMemoryStatus": ApiCategory.SHARED_MEMORY,
    "SystemSharedMemoryRegister": ApiCategory.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryStatus": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryRegister": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryUnregister": ApiCategory.SHARED_MEMORY,
    "TraceSetting": ApiCategory.TRACE,
    "LogSettings": ApiCategory.LOGGING,
}
"""Categories by method of Triton's service."""


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls without the metadata `authorization: Bearer KEY` as unauthenticated, before any message is read."""

    def __init__(self, api_key: str) -> None:
        self._key = api_key.encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method in _OPEN_METHODS or details.method.startswith(_OPEN_SERVICE):
            return await continuation(details)
        refusal = check_api_key(_find_metadata(details, "authorization"), self._key, "authorization", "metadata")
        return await continuation(details) if refusal is None else _refuse(refusal)


class RestrictedProtocolInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends restricted calls without their metadata as permission denied."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the call's own handler, or one that refuses it in Triton's words."""
        restriction = self._restrictions.find(_find_category(details.method))
        if restriction is None:
            return await continuation(details)
        name = _KEY_PREFIX + restriction.key
        if restriction.admits(_find_metadata(details, name)):
            return await continuation(details)
        return _refuse(SluiceError(ErrorCode.FORBIDDEN, f"This protocol is restricted, expecting header '{name}'"))


def _find_metadata(details: Any, name: str) -> bytes | None:
    value = dict(details.invocation_metadata or ()).get(name)
    return value.encode("utf-8", "replace") if isinstance(value, str) else value


def _find_category(method: str) -> ApiCategory | None:
    if method.startswith("/grpc.health."):
        return ApiCategory.HEALTH
    return API_CATEGORIES.get(method.removeprefix(_SERVICE))


def _refuse(refusal: SluiceError) -> Any:
    async def serve(requests: Any, context: Any) -> None:
        await abort(context, refusal)

    # A streaming handler reads no message first; unary clients see the same status.
    return grpc.stream_stream_rpc_method_handler(serve)
