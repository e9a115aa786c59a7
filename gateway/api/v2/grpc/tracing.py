"""Records requests over gRPC: the roots of traces and timelines."""

from secrets import token_hex
from typing import Any

import grpc

from sluice.gateway.api.v2.grpc.messages import WireMessage
from sluice.gateway.api.v2.grpc.unary import RawCall
from sluice.gateway.calls import current_call
from sluice.gateway.tracing.tracer import Tracer, finish_root
from sluice.record.spans import Span, current_span
from sluice.record.timelines import RECEIVED

_SERVICE = "inference.GRPCInferenceService"
_INFER = f"/{_SERVICE}/ModelInfer"
_ID_BYTES = 12
_FAILURES = frozenset({2, 4, 8, 12, 13, 14, 15})
"""Statuses of servers' faults, as OpenTelemetry's conventions list them."""


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
    attributes = {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method}
    root = tracer.open(f"{_SERVICE}/{method}", request_id, {**attributes}, received_ns)
    if root is not None:
        root.note(RECEIVED, at_ns=root.started_ns)


def finish(root: Span, status: int | None) -> None:
    """End the recording of a request with gRPC's status."""
    if status is not None:
        root.attributes["rpc.grpc.status_code"] = status
    finish_root(root, status, is_failure=status in _FAILURES)
    if current_span.get() is root:
        current_span.set(None)
