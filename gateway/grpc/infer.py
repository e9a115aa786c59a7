"""ModelInfer, and what it shares with ModelStreamInfer: reading requests and writing responses."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2

from gateway.grpc.messages import InferMessage, split_message
from gateway.grpc.requests import GrpcInferRequest, parse_infer_request
from gateway.long_work import LONG_BYTES, LONG_ELEMENTS, prepare_inputs, run_aside, trim_later
from gateway.path_masking import client_message
from gateway.v2.classification import classify
from gateway.v2.forwarded_headers import ForwardedHeaders
from gateway.v2.server import V2Service, parse_version
from gateway.v2.shared_memory import write_output
from gateway.v2.trace import Trace
from pipelines.text.model import text_model_of
from serving.model import Model, infer_one
from serving.request import LATEST, InferResponse, Parameter
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

T = TypeVar("T")
_TENANT = "x-sluice-tenant"
_STICKY = "x-sluice-sticky"
_MAX_TENANT_LENGTH = 128
_FINAL = "triton_final_response"
Metadata = Iterable[tuple[str, Any]]


class InferReader:
    """Reads messages into requests to models."""

    def __init__(self, service: V2Service, header_forward_pattern: str | None) -> None:
        self._service = service
        self._forwarded = ForwardedHeaders(header_forward_pattern)

    async def read(self, infer: InferMessage, context: Any, *, is_unary: bool = False) -> GrpcInferRequest:
        """Parse `infer`. Raises SluiceError for an unknown model, for one that takes no unary calls, and INVALID."""
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
        if not self._forwarded and text_model_of(model) is None:
            return await self._parse(infer, model, is_unary=is_unary)
        metadata = [(key, _text(value)) for key, value in context.invocation_metadata() or ()]
        parsed = await self._parse(infer, model, self._forwarded.choose(metadata), is_unary=is_unary)
        parsed.request.tenant = _read_tenant(metadata)
        return parsed

    async def _parse(
        self, infer: InferMessage, model: Model, forwarded: Mapping[str, str] | None = None, *, is_unary: bool
    ) -> GrpcInferRequest:
        def parse() -> GrpcInferRequest:
            return parse_infer_request(infer, model, self._service.shared_memory, forwarded, is_unary=is_unary)

        parsed = await run_aside(parse) if infer.contents else parse()
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

    async def __call__(self, raw: bytes, context: Any) -> bytes:
        """Answer one request. Raises SluiceError. Cancelling the call cancels the request."""
        received_ns = perf_counter_ns()
        parsed = await self._reader.read(split_message(raw), context, is_unary=True)
        if parsed.is_decoupled:
            raise _only_for_streams()
        trace = self._reader.begin_trace(parsed, received_ns)
        if trace is None:
            response = await infer_one(parsed.model, parsed.request)
            return await encode(parsed, response, lambda: _serialize(parsed, response))
        try:
            return await _infer_traced(parsed, trace)
        finally:
            trace.finish()


def _only_for_streams() -> SluiceError:
    message = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    return SluiceError(ErrorCode.UNIMPLEMENTED, message)


async def encode(parsed: GrpcInferRequest, response: InferResponse, work: Callable[[], T]) -> T:
    """Return the result of `work`, which encodes `response`, from a thread where that takes long."""
    in_python = [each for each in response.outputs if each.datatype == "BYTES" or each.name in parsed.classes]
    if sum(each.num_elements for each in in_python) > LONG_ELEMENTS:
        return await run_aside(work)
    return work()


def _serialize(parsed: GrpcInferRequest, response: InferResponse) -> bytes:
    message = service_pb2.ModelInferResponse()
    _write_response(message, parsed, response)
    serialized: bytes = message.SerializeToString()
    return serialized


async def _infer_traced(parsed: GrpcInferRequest, trace: Trace) -> bytes:
    """Run the request like `infer_one`, and note where the job's time goes."""
    answered: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def receive(response: InferResponse) -> None:
        if not answered.done():
            answered.set_result(response)

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
    return await encode(parsed, response, lambda: _serialize(parsed, response))


def _read_tenant(metadata: Metadata) -> str:
    """Return the tenant that an LLM's tokens are charged to. Raises INVALID for what is no name."""
    tenant: str = dict(metadata).get(_TENANT, "")
    if len(tenant) > _MAX_TENANT_LENGTH or not tenant.isprintable():
        raise invalid(_TENANT, f"{_TENANT} must have at most {_MAX_TENANT_LENGTH} printable characters")
    return tenant


def _find_routing_key(message: "service_pb2.ModelInferRequest", context: Any) -> str:
    """Return the key that keeps requests on one version: the client's, else its sequence's id."""
    for name, value in context.invocation_metadata() or ():
        if name == _STICKY:
            return _text(value)
    parameter = message.parameters.get("sequence_id")
    kind = None if parameter is None else parameter.WhichOneof("parameter_choice")
    return "" if kind is None else str(getattr(parameter, kind) or "")


def _text(value: str | bytes) -> str:
    """Return a value of metadata as text; that of a binary key is bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def stream_message(parsed: GrpcInferRequest, response: InferResponse) -> "service_pb2.ModelStreamInferResponse":
    """Make one message of a stream: outputs, an error, or only that the request has ended."""
    message = service_pb2.ModelStreamInferResponse()
    inner = message.infer_response
    error = response.error
    if error is None and not (response.is_empty and parsed.is_decoupled):
        try:
            _write_response(inner, parsed, response)
        except SluiceError as caught:
            error = caught
            inner.Clear()
    if error is not None:
        message.error_message = client_message(error)
    if not inner.model_name:
        inner.model_name = parsed.model.name
        inner.id = response.id
    inner.parameters[_FINAL].bool_param = response.is_final
    return message


def refusal_message(request_id: str, error: SluiceError) -> "service_pb2.ModelStreamInferResponse":
    """Make the message for a request of a stream that was refused."""
    message = service_pb2.ModelStreamInferResponse(error_message=client_message(error))
    message.infer_response.id = request_id
    message.infer_response.SetInParent()
    return message


def _write_response(
    message: "service_pb2.ModelInferResponse", parsed: GrpcInferRequest, response: InferResponse
) -> None:
    """Fill `message` and shared memory. Raises SluiceError for outputs that cannot have their requested form."""
    model = parsed.model
    message.model_name = model.name
    message.model_version = str(model.version)
    message.id = response.id
    for name, value in response.parameters.items():
        _write_parameter(message.parameters[name], value)
    for tensor in response.outputs:
        _write_output(message, parsed, tensor)


def _write_output(message: "service_pb2.ModelInferResponse", parsed: GrpcInferRequest, tensor: Tensor) -> None:
    if parsed.classes and tensor.name in parsed.classes:
        labels = parsed.model.labels.get(tensor.name, ())
        tensor = classify(tensor, parsed.classes[tensor.name], labels, parsed.model.spec.max_batch_size > 0)
    output = message.outputs.add()
    output.name = tensor.name
    output.datatype = tensor.datatype
    output.shape.extend(tensor.shape)
    raw = tensor.raw
    if parsed.windows and tensor.name in parsed.windows:
        write_output(parsed.windows[tensor.name], tensor)
        raw = b""
    message.raw_output_contents.append(raw if isinstance(raw, bytes) else bytes(raw))


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
