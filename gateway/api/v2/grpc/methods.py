"""The methods of the server, by path, what stands before them (restrictions, keys and quotas, recordings), and the one
table from failures to gRPC statuses."""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from inspect import isasyncgenfunction
from secrets import token_hex
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

import grpc

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.messages import WireMessage, join_message, message_size, parse_settings
from sluice.gateway.calls import Call, CallLog, current_call
from sluice.gateway.front.path_masking import client_message
from sluice.gateway.front.restrictions import ApiCategory, Restrictions
from sluice.gateway.telemetry.tracer import Tracer, finish_root
from sluice.gateway.tenancy.access.control import TENANT_HEADER, Credentials
from sluice.gateway.tenancy.access.rights import CATEGORY_GROUPS
from sluice.record.spans import Span, current_span
from sluice.record.timelines import RECEIVED

log = logging.getLogger(__name__)
SERVICE = "inference.GRPCInferenceService"
_PREFIX = f"/{SERVICE}/"
_INFER = f"{_PREFIX}ModelInfer"
_OPEN_METHODS = (f"{_PREFIX}ServerLive", f"{_PREFIX}ServerReady")
_OPEN_SERVICE = "/grpc.health."
_ID_BYTES = 12
_KEY_PREFIX = "triton-grpc-protocol-"
_FAILURES = frozenset({2, 4, 8, 12, 13, 14, 15})
"""Statuses of servers' faults, as OpenTelemetry's conventions list them."""
Handler = Any
"""A `grpc.RpcMethodHandler`, which has no types."""
BeginDirect = Callable[[bytes | memoryview, Any], bool]
"""Begins to answer the only message of a `GrpcCall`, which gets the answer without a task. False for a request that
only the method's handler can answer. Raises SluiceError."""
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
GRPC_CODE: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}
RawCall = Callable[[bytes | memoryview, Any], Awaitable[WireMessage]]
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""How a call ends: code, text and trailing metadata."""


def raw_handler(name: str, call: RawCall) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Make a handler of raw messages, which no layer of gRPC copies or decodes."""

    async def serve(raw: bytes | memoryview, context: Any) -> WireMessage:
        try:
            return await call(raw, context)
        except Exception as error:
            refusal = as_sluice_error(error, name)
            # The traceback holds frames that hold the job, which holds the error: work for the garbage collector.
            error.__traceback__ = None
            await abort(context, refusal)

    return grpc.unary_unary_rpc_method_handler(serve, response_serializer=join_message)


def sync_handler(name: str, request_type: Any, answer: Callable[[Any], Any]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Make a handler of a function from message to message."""

    async def call(raw: bytes | memoryview, context: Any) -> bytes:
        serialized: bytes = answer(parse_settings(request_type, raw)).SerializeToString()
        return serialized

    return raw_handler(name, call)


def async_handler(
    name: str, request_type: Any, answer: Callable[[Any], Awaitable[Any]]
) -> "grpc.RpcMethodHandler[bytes, bytes]":

    async def call(raw: bytes | memoryview, context: Any) -> bytes:
        serialized: bytes = (await answer(parse_settings(request_type, raw))).SerializeToString()
        return serialized

    return raw_handler(name, call)


def as_sluice_error(error: Exception, method: str) -> SluiceError:
    """Return `error` in words for the client. An unexpected one goes to the log with its trace."""
    if isinstance(error, SluiceError):
        return error
    reference = secrets.token_hex(6)
    log.error("%s failed unexpectedly (%s)", method, reference, exc_info=error)
    return SluiceError(ErrorCode.INTERNAL, f"internal server error; the server's log has the details under {reference}")


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: SluiceError) -> NoReturn:
    """End the call with `error`."""
    await context.abort(*status_of(error))
    raise AssertionError("abort raises")


def status_of(error: SluiceError) -> Status:
    """Return how a call ends that failed with `error`. Its retry time reaches clients that have a retry policy."""
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    if error.retry_after_s is not None:
        metadata = (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1000)))),)
    return GRPC_CODE[error.code], client_message(error), metadata


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
    call = calls.open("grpc", method.removeprefix(_PREFIX), token_hex(_ID_BYTES))
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
    return API_CATEGORIES.get(method.removeprefix(_PREFIX))


def _refuse(refusal: SluiceError) -> Any:
    async def serve(requests: Any, context: Any) -> None:
        await abort(context, refusal)

    # A streaming handler reads no message first; unary clients see the same status.
    return grpc.stream_stream_rpc_method_handler(serve)


def trace_call(tracer: Tracer, details: Any, handler: Any) -> Any:
    """Return the handler of an inference that records it, and the handler itself of any other call."""
    if details.method != _INFER or handler.unary_unary is None:
        return handler
    serve: RawCall = handler.unary_unary

    async def serve_traced(raw: bytes | memoryview, context: Any) -> WireMessage:
        if tracer.is_exporting:
            open_root(tracer, "ModelInfer")
        status: int | None = None
        try:
            answer = await serve(raw, context)
            status = 0
            return answer
        finally:
            root = current_span.get()
            if root is not None:
                code = context.code()
                finish(root, status if code is None else getattr(code, "value", (code,))[0])

    return grpc.unary_unary_rpc_method_handler(serve_traced, handler.request_deserializer, handler.response_serializer)


def open_root(tracer: Tracer, method: str, request_id: str = "", received_ns: int = 0) -> None:
    """Begin the recording of a request whose message has come at `received_ns` (perf_counter_ns), by default now."""
    call = current_call.get()
    request_id = request_id or (token_hex(_ID_BYTES) if call is None else call.request_id)
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
    root = tracer.open(f"{SERVICE}/{method}", request_id, {**attributes}, received_ns)
    if root is not None:
        root.note(RECEIVED, at_ns=root.started_ns)


def finish(root: Span, status: int | None) -> None:
    """End the recording of a request with gRPC's status."""
    if status is not None:
        root.attributes["rpc.grpc.status_code"] = status
    finish_root(root, status, is_failure=status in _FAILURES)
    if current_span.get() is root:
        current_span.set(None)


class CallDetails(NamedTuple):
    """The details of a call before its first message, with the fields of grpcio's own type."""

    method: str
    invocation_metadata: Iterable[tuple[str, str | bytes]]


class Methods:
    """Finds the handler of a call."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        direct: Mapping[str, BeginDirect],
        calls: CallLog,
        restrictions: Restrictions,
        tracer: Tracer | None = None,
    ) -> None:
        """`handlers`: by full path, such as /grpc.health.v1.Health/Check. `direct`: of some of these paths."""
        self._handlers = handlers
        self._direct = direct
        self._calls = calls
        self._restrictions = restrictions
        self._tracer = tracer or Tracer()

    def find_direct(self, path: str) -> BeginDirect | None:
        """Return what answers plain calls of a path without a task; None where there is none, or a guard before it."""
        is_guarded = self._calls.is_active or self._restrictions or self._tracer.is_exporting
        return None if is_guarded else self._direct.get(path)

    def find(self, details: CallDetails) -> Handler | None:
        """Return the handler of a call, behind whatever guards it; None for a method that there is not.

        Runs in the call's own task: a guard makes the call the current one.
        """
        handler = self._handlers.get(details.method)
        if handler is None:
            return None
        if self._tracer.is_active:
            handler = trace_call(self._tracer, details, handler)
        if self._restrictions:
            handler = restrict(self._restrictions, details) or handler
        return guard(self._calls, details, handler) if self._calls.is_active else handler


def service_handlers(service: str, methods: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return the handlers of `service` by full path."""
    return {f"/{service}/{name}": handler for name, handler in methods.items()}
