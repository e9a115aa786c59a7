"""Access over gRPC: who sends a call and what he may, and metadata for restricted categories of requests."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from inspect import isasyncgenfunction
from secrets import token_hex
from typing import Any
from urllib.parse import unquote

import grpc

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.messages import WireMessage, message_size
from sluice.gateway.api.v2.grpc.unary import RawCall, abort
from sluice.gateway.calls import Call, CallLog
from sluice.gateway.front.restrictions import ApiCategory, Restrictions
from sluice.gateway.tenancy.access.control import TENANT_HEADER, Credentials
from sluice.gateway.tenancy.access.rights import CATEGORY_GROUPS

_SERVICE = "/inference.GRPCInferenceService/"
_OPEN_METHODS = (f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady")
_OPEN_SERVICE = "/grpc.health."
_ID_BYTES = 12
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


def guard(calls: CallLog, details: Any, handler: Any) -> Any:
    """Open a call for an RPC, and return the handler that finds out who sends it, and ends it.

    The requests of ModelStreamInfer are calls, too: its own is only the one that they are siblings of.
    """
    method: str = details.method
    if method in _OPEN_METHODS or method.startswith(_OPEN_SERVICE):
        return handler
    category = _find_category(method)
    group = None if category is None else CATEGORY_GROUPS[category]
    is_unary = handler.unary_unary is not None
    call = calls.open("grpc", method.removeprefix(_SERVICE), token_hex(_ID_BYTES))
    call.group = group if category is ApiCategory.INFERENCE else None

    async def identify(context: Any) -> None:
        try:
            await calls.identify(call, _read_credentials(details, context), group)
        except SluiceError as refusal:
            await abort(context, refusal)

    codecs = handler.request_deserializer, handler.response_serializer
    if is_unary:
        return grpc.unary_unary_rpc_method_handler(partial(_serve_call, call, identify, handler.unary_unary), *codecs)
    serve = handler.stream_stream or handler.unary_stream
    make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
    return make(_guarded_stream(identify, serve), *codecs)


def _guarded_stream(identify: Callable[[Any], Awaitable[None]], serve: Callable[[Any, Any], Any]) -> Any:
    """Return `serve` behind `identify`. It writes to its context, or else yields its messages."""

    async def write(requests: Any, context: Any) -> None:
        await identify(context)
        await serve(requests, context)

    async def generate(requests: Any, context: Any) -> AsyncIterator[Any]:
        await identify(context)
        async for message in serve(requests, context):
            yield message

    return generate if isasyncgenfunction(serve) else write


async def _serve_call(
    call: Call, identify: Callable[[Any], Awaitable[None]], serve: RawCall, raw: bytes | memoryview, context: Any
) -> WireMessage:
    call.bytes_in = len(raw)
    try:
        await identify(context)
        try:
            await call.begin()
        except SluiceError as refusal:
            await abort(context, refusal)
        answer = await serve(raw, context)
        call.bytes_out, call.status = message_size(answer), grpc.StatusCode.OK.value[0]
        return answer
    finally:
        if call.status is None and (code := context.code()):
            call.status = getattr(code, "value", (code,))[0]
        call.release()


def _read_credentials(details: Any, context: Any) -> Credentials:
    authorization = _find_metadata(details, "authorization")
    subject = ""
    if authorization is None:
        names = (context.auth_context() or {}).get("x509_common_name", ())
        subject = next((name.decode("utf-8", "replace") for name in names), "")
    return Credentials(
        authorization,
        parse_peer(context.peer()),
        _text_metadata(details, "x-forwarded-for"),
        _text_metadata(details, TENANT_HEADER),
        subject,
        ("authorization", "metadata"),
    )


def _text_metadata(details: Any, name: str) -> str:
    return (_find_metadata(details, name) or b"").decode("utf-8", "replace")


def parse_peer(peer: str) -> str:
    """Return the address of a client from gRPC's name of it, such as `ipv4:10.0.0.1:50000`; "" for any but IP."""
    kind, _, rest = peer.partition(":")
    return unquote(rest.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else ""


def restrict(restrictions: Restrictions, details: Any) -> Any:
    """Return a handler that refuses, in Triton's words, a restricted call without its metadata; None for others."""
    restriction = restrictions.find(_find_category(details.method))
    if restriction is None:
        return None
    name = _KEY_PREFIX + restriction.key
    if restriction.admits(_find_metadata(details, name)):
        return None
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
