"""ModelInfer, and what it has in common with ModelStreamInfer."""

import asyncio
import re
from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from gateway.grpc.requests import Asked, read_request
from gateway.grpc.responses import write_response
from gateway.v2.service import Service
from gateway.v2.trace import Trace
from gateway.v2.version import parse_version
from pipelines.text.model import text_model_of
from serving.model import infer_one
from serving.request import LATEST, InferResponse
from sluice.errors import ErrorCode, SluiceError, invalid

_TENANT = "x-sluice-tenant"
_STICKY = "x-sluice-sticky"
_MAX_TENANT_LENGTH = 128

Metadata = Iterable[tuple[str, Any]]


def parse(message_type: Any, raw: bytes) -> Any:
    """A message of `message_type` from its wire form. Raises INTERNAL, as gRPC's own code does."""
    try:
        return message_type.FromString(raw)
    except DecodeError:
        raise SluiceError(ErrorCode.INTERNAL, "Unable to parse request") from None


class InferReader:
    """Makes requests to models of messages."""

    def __init__(self, service: Service, header_forward_pattern: str | None) -> None:
        self._service = service
        self._forwarded = (
            re.compile(header_forward_pattern, re.IGNORECASE) if header_forward_pattern is not None else None
        )

    def read(self, message: "service_pb2.ModelInferRequest", context: Any, *, is_unary: bool = False) -> Asked:
        """Raises SluiceError for a model that is not there or not for unary calls, and for a message that is wrong."""
        version = parse_version(message.model_version)
        model = self._service.find(message.model_name, version)
        if version == LATEST and self._service.has_weights(message.model_name):
            model = self._service.route(message.model_name, version, _routing_key(message, context))
        # An LLM's requests, and those of its pipelines, say themselves whether they are for streams; other models are,
        # whatever the message is.
        if is_unary and model.spec.is_decoupled and model.streams_unasked:
            raise _only_for_streams()
        if self._forwarded is None and text_model_of(model) is None:
            return read_request(message, model, self._service.shared_memory)
        metadata = [(key, _text(value)) for key, value in context.invocation_metadata() or ()]
        asked = read_request(message, model, self._service.shared_memory, self._forward(metadata))
        asked.request.tenant = _tenant(metadata)
        return asked

    def begin_trace(self, asked: Asked, received_ns: int) -> Trace | None:
        """The trace of a request that came at `received_ns` (perf_counter_ns), if it is one of those to be traced."""
        trace = self._service.trace.begin(asked.model, asked.request)
        if trace is not None:
            trace.capture("GRPC_WAITREAD_END", received_ns)
        return trace

    def _forward(self, metadata: Metadata) -> list[tuple[str, str]]:
        if self._forwarded is None:
            return []
        return [(key, value) for key, value in metadata if self._forwarded.search(key)]


class ModelInfer:
    """The unary call: one request, one response."""

    def __init__(self, reader: InferReader) -> None:
        self._reader = reader

    async def __call__(self, raw: bytes, context: Any) -> bytes:
        """Raises SluiceError. Cancelling it cancels the request."""
        received_ns = perf_counter_ns()
        asked = self._reader.read(parse(service_pb2.ModelInferRequest, raw), context, is_unary=True)
        if asked.is_decoupled:
            raise _only_for_streams()
        trace = self._reader.begin_trace(asked, received_ns)
        if trace is None:
            return _serialized(asked, await infer_one(asked.model, asked.request))
        try:
            return await _infer_traced(asked, trace)
        finally:
            trace.finish()


def _only_for_streams() -> SluiceError:
    message = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    return SluiceError(ErrorCode.UNIMPLEMENTED, message)


def _serialized(asked: Asked, response: InferResponse) -> bytes:
    message = service_pb2.ModelInferResponse()
    write_response(message, asked, response)
    serialized: bytes = message.SerializeToString()
    return serialized


async def _infer_traced(asked: Asked, trace: Trace) -> bytes:
    """As `infer_one`, noting where the job's time goes."""
    answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferResponse) -> None:
        if not answered.done():
            answered.set_result(response)

    job = asked.model.submit(asked.request, receive)
    try:
        response = await answered
    finally:
        job.cancel()
        trace.capture_job(job)
    if response.error is not None:
        raise response.error
    trace.capture("INFER_RESPONSE_COMPLETE")
    trace.capture_tensors("TENSOR_BACKEND_OUTPUT", response.outputs)
    trace.capture("GRPC_SEND_START")
    return _serialized(asked, response)


def _tenant(metadata: Metadata) -> str:
    """Whom an LLM's tokens are charged to. Raises INVALID for what is no name."""
    tenant: str = dict(metadata).get(_TENANT, "")
    if len(tenant) > _MAX_TENANT_LENGTH or not tenant.isprintable():
        raise invalid(_TENANT, f"{_TENANT} must have at most {_MAX_TENANT_LENGTH} printable characters")
    return tenant


def _routing_key(message: "service_pb2.ModelInferRequest", context: Any) -> str:
    """What keeps to one of the versions that share a model's requests: what the client says, else its sequence."""
    for name, value in context.invocation_metadata() or ():
        if name == _STICKY:
            return _text(value)
    parameter = message.parameters.get("sequence_id")
    kind = None if parameter is None else parameter.WhichOneof("parameter_choice")
    return "" if kind is None else str(getattr(parameter, kind) or "")


def _text(value: str | bytes) -> str:
    """A value of metadata; that of a binary key is bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
