"""ModelInfer, and what it shares with ModelStreamInfer: reading requests and writing responses."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any

from tritonclient.grpc import service_pb2

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.access.control import TENANT_HEADER, check_tenant
from sluice.gateway.calls import allowed_priority, current_call
from sluice.gateway.grpc.messages import (
    INLINE_BYTES,
    InferMessage,
    WireMessage,
    add_raw_contents,
    as_stream_response,
    split_message,
)
from sluice.gateway.grpc.methods import DirectCall
from sluice.gateway.grpc.requests import GrpcInferRequest, parse_infer_request
from sluice.gateway.grpc.tracing import open_root
from sluice.gateway.long_work import LONG_BYTES, LONG_ELEMENTS, has_short_inputs, prepare_inputs, run_aside, trim_later
from sluice.gateway.path_masking import client_message
from sluice.gateway.sessions import STICKY_HEADER, find_session
from sluice.gateway.v2.classification import classify
from sluice.gateway.v2.forwarded_headers import ForwardedHeaders
from sluice.gateway.v2.server import V2Service, parse_version
from sluice.gateway.v2.shared_memory import LONG_COPY_BYTES, LongCopyError, write_output
from sluice.gateway.v2.trace import Trace
from sluice.pipelines.text.model import text_model_of
from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.request import LATEST, InferResponse, Parameter
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Tensor

_COPIED_BYTES = 32 << 10
"""Most bytes of tensors that are copied into a message; longer ones follow it."""
_NOTHING = memoryview(b"")
_FINAL = "triton_final_response"
Metadata = Iterable[tuple[str, Any]]


class InferReader:
    """Reads messages into requests to models."""

    def __init__(
        self, service: V2Service, header_forward_pattern: str | None, session_headers: Sequence[str] = ()
    ) -> None:
        """`session_headers` are names of metadata, the first of which names a request's session."""
        self.access = service.calls.access
        self._session_headers = session_headers
        self.tracer = service.tracer
        self._service = service
        self._forwarded = ForwardedHeaders(header_forward_pattern)

    async def read(
        self, infer: InferMessage, context: Any, received_ns: int, *, is_unary: bool = False
    ) -> GrpcInferRequest:
        """Parse `infer`, which came at `received_ns` (perf_counter_ns), and begin its recording where it may have a
        timeline. Raises SluiceError for an unknown model, for one that takes no unary calls, and INVALID."""
        message = infer.header
        if infer.size_bytes >= LONG_BYTES:
            trim_later()
        version = parse_version(message.model_version)
        model = self._service.find(message.model_name, version)
        if version == LATEST and self._service.has_weights(message.model_name):
            model = self._service.route(message.model_name, version, _find_routing_key(message, context))
        # Requests to an LLM and its pipelines say themselves whether they stream; other decoupled models always do.
        if is_unary and model.spec.is_decoupled and model.streams_unasked:
            raise _only_for_streams()
        if not self.tracer.is_exporting and self.tracer.records(model):
            method, request_id = ("ModelInfer", "") if is_unary else ("ModelStreamInfer", message.id)
            open_root(self.tracer, method, request_id, received_ns)
        call = current_call.get()
        if call is None and not self._forwarded and text_model_of(model) is None:
            return await self._parse(infer, model, is_unary=is_unary)
        metadata = [(key, _text(value)) for key, value in context.invocation_metadata() or ()]
        parsed = await self._parse(infer, model, self._forwarded.choose(metadata), is_unary=is_unary)
        parsed.request.session = find_session(dict(metadata), self._session_headers)
        if call is None:
            parsed.request.tenant = _read_tenant(metadata)
            return parsed
        parsed.request.tenant = call.tenant
        parsed.request.priority = allowed_priority(parsed.request.priority or None)
        return parsed

    def read_plain(self, raw: bytes | memoryview) -> GrpcInferRequest | None:
        """Parse a unary request that needs no waiting, no trace and nothing of its call; None for another.

        Raises like `read`.
        """
        if len(raw) > INLINE_BYTES or self._forwarded or self._service.trace.is_on:
            return None
        infer = split_message(raw)
        name, version = infer.header.model_name, parse_version(infer.header.model_version)
        model = self._service.find(name, version)
        if model.spec.is_decoupled or text_model_of(model) is not None:
            return None
        if any(each.data_type is BYTES for each in model.spec.outputs.values()):
            return None  # many strings take long to write
        if version == LATEST and self._service.has_weights(name):
            return None
        try:
            parsed = parse_infer_request(infer, model, self._service.shared_memory, None, is_unary=True)
        except LongCopyError:
            return None
        is_long = any(len(window) >= LONG_COPY_BYTES for window in parsed.windows.values())
        if parsed.is_decoupled or parsed.classes or is_long or not has_short_inputs(parsed.request):
            return None
        return parsed

    async def _parse(
        self, infer: InferMessage, model: Model, forwarded: Mapping[str, str] | None = None, *, is_unary: bool
    ) -> GrpcInferRequest:
        def parse() -> GrpcInferRequest:
            return parse_infer_request(infer, model, self._service.shared_memory, forwarded, is_unary=is_unary)

        try:
            parsed = await run_aside(parse) if infer.contents else parse()
        except LongCopyError:
            parsed = await run_aside(parse)
        if not has_short_inputs(parsed.request):
            await prepare_inputs(parsed.request, model)
        return parsed

    def begin_trace(self, parsed: GrpcInferRequest, received_ns: int) -> Trace | None:
        """Begin the trace of a request that came at `received_ns` (perf_counter_ns), where it is to be traced."""
        trace = self._service.trace.begin(parsed.model, parsed.request)
        if trace is not None:
            trace.capture("GRPC_WAITREAD_END", received_ns)
        return trace


class ModelInfer:
    """The unary call: one request, one response."""

    def __init__(self, reader: InferReader) -> None:
        self._reader = reader

    async def __call__(self, raw: bytes | memoryview, context: Any) -> WireMessage:
        """Answer one request. Raises SluiceError. Cancelling the call cancels the request."""
        received_ns = perf_counter_ns()
        parsed = await self._reader.read(split_message(raw), context, received_ns, is_unary=True)
        if parsed.is_decoupled:
            raise _only_for_streams()
        trace = self._reader.begin_trace(parsed, received_ns)
        if trace is None:
            response = await infer_one(parsed.model, parsed.request)
            return await _encode(parsed, response)
        try:
            return await _infer_traced(parsed, trace)
        finally:
            trace.finish()

    def begin(self, raw: bytes | memoryview, call: DirectCall) -> InferJob | None:
        """Begin to answer a plain request without a task; None for another. Raises SluiceError."""
        parsed = self._reader.read_plain(raw)
        if parsed is None:
            return None
        return parsed.model.submit(parsed.request, partial(_answer_directly, parsed, call))


def _answer_directly(parsed: GrpcInferRequest, call: DirectCall, response: InferResponse) -> None:
    if response.error is not None:
        call.fail(response.error)
        return
    try:
        message = _serialize(parsed, response)
    except Exception as error:
        call.fail(error)
    else:
        call.respond(message)


def _only_for_streams() -> SluiceError:
    message = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    return SluiceError(ErrorCode.UNIMPLEMENTED, message)


def takes_long(parsed: GrpcInferRequest, response: InferResponse) -> bool:
    """Whether `response` has so many strings or classes, or so much for shared memory, that a thread should encode
    it."""
    num_elements = 0
    for each in response.outputs:
        if each.data_type is BYTES or each.name in parsed.classes:
            num_elements += each.num_elements
        elif each.name in parsed.windows and each.size_bytes >= LONG_COPY_BYTES:
            return True
    return num_elements > LONG_ELEMENTS


async def _encode(parsed: GrpcInferRequest, response: InferResponse) -> WireMessage:
    if takes_long(parsed, response):
        return await run_aside(lambda: _serialize(parsed, response))
    return _serialize(parsed, response)


def _serialize(parsed: GrpcInferRequest, response: InferResponse) -> WireMessage:
    message = service_pb2.ModelInferResponse()
    raws = _write_response(message, parsed, response)
    if sum(map(len, raws)) > _COPIED_BYTES:
        return add_raw_contents(message.SerializeToString(), raws)
    message.raw_output_contents.extend(map(bytes, raws))
    serialized: bytes = message.SerializeToString()
    return serialized


async def _infer_traced(parsed: GrpcInferRequest, trace: Trace) -> WireMessage:
    """Run the request like `infer_one`, and note where the job's time goes."""
    answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferResponse) -> None:
        if not answered.done():
            answered.set_result(response)

    with trace.following():
        job = parsed.model.submit(parsed.request, receive)
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
    return await _encode(parsed, response)


def _read_tenant(metadata: Metadata) -> str:
    """Return the tenant that an LLM's tokens are charged to. Raises INVALID for what is no name."""
    tenant = dict(metadata).get(TENANT_HEADER, "")
    return check_tenant(tenant) if tenant else ""


def _find_routing_key(message: "service_pb2.ModelInferRequest", context: Any) -> str:
    """Return the key that keeps requests on one version: the client's, else its sequence's id."""
    for name, value in context.invocation_metadata() or ():
        if name == STICKY_HEADER:
            return _text(value)
    parameter = message.parameters.get("sequence_id")
    kind = None if parameter is None else parameter.WhichOneof("parameter_choice")
    return "" if kind is None else str(getattr(parameter, kind) or "")


def _text(value: str | bytes) -> str:
    """Return a value of metadata as text; that of a binary key is bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def stream_message(parsed: GrpcInferRequest, response: InferResponse) -> WireMessage:
    """Make one message of a stream: outputs, an error, or only that the request has ended."""
    raws: list[memoryview] = []
    message = service_pb2.ModelStreamInferResponse()
    inner = message.infer_response
    error = response.error
    if error is None and not (response.is_empty and parsed.is_decoupled):
        try:
            raws = _write_response(inner, parsed, response)
        except SluiceError as caught:
            error = caught
            inner.Clear()
    if error is not None:
        message.error_message = client_message(error)
    if not inner.model_name:
        inner.model_name = parsed.model.name
        inner.id = response.id
    inner.parameters[_FINAL].bool_param = response.is_final
    if sum(map(len, raws)) > _COPIED_BYTES:
        return as_stream_response(add_raw_contents(inner.SerializeToString(), raws))
    inner.raw_output_contents.extend(map(bytes, raws))
    serialized: bytes = message.SerializeToString()
    return serialized


def refusal_message(request_id: str, error: SluiceError) -> bytes:
    """Make the message for a request of a stream that was refused."""
    message = service_pb2.ModelStreamInferResponse(error_message=client_message(error))
    message.infer_response.id = request_id
    message.infer_response.SetInParent()
    serialized: bytes = message.SerializeToString()
    return serialized


def _write_response(
    message: "service_pb2.ModelInferResponse", parsed: GrpcInferRequest, response: InferResponse
) -> list[memoryview]:
    """Fill `message` and shared memory, and return the outputs' values, which are to follow.

    Raises SluiceError for outputs that cannot have their requested form.
    """
    model = parsed.model
    message.model_name = model.name
    message.model_version = str(model.version)
    message.id = response.id
    for name, value in response.parameters.items():
        _write_parameter(message.parameters[name], value)
    return [_write_output(message, parsed, tensor) for tensor in response.outputs]


def _write_output(message: "service_pb2.ModelInferResponse", parsed: GrpcInferRequest, tensor: Tensor) -> memoryview:
    """Add an output to `message`, and return its values; none where they are in shared memory."""
    if parsed.classes and tensor.name in parsed.classes:
        labels = parsed.model.labels.get(tensor.name, ())
        tensor = classify(tensor, parsed.classes[tensor.name], labels, parsed.model.spec.max_batch_size > 0)
    output = message.outputs.add()
    output.name = tensor.name
    output.datatype = tensor.datatype
    output.shape.extend(tensor.shape)
    if parsed.windows and tensor.name in parsed.windows:
        write_output(parsed.windows[tensor.name], tensor)
        return _NOTHING
    return memoryview(tensor.raw).cast("B")


def _write_parameter(parameter: "service_pb2.InferParameter", value: Parameter) -> None:
    """Set `parameter` to `value`, in the field of its type."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value > 2**63 - 1:
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value
