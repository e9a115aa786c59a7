"""ModelInfer, and what it shares with ModelStreamInfer: reading requests and writing responses."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter_ns
from typing import Any

from tritonclient.grpc import service_pb2

from sluice.errors import SluiceError
from sluice.gateway.api.v2.grpc.call import GrpcCall
from sluice.gateway.api.v2.grpc.messages import (
    INLINE_BYTES,
    InferMessage,
    WireMessage,
    add_raw_contents,
    as_stream_response,
    split_message,
)
from sluice.gateway.api.v2.grpc.methods import open_root
from sluice.gateway.api.v2.grpc.requests import parse_infer_request
from sluice.gateway.api.v2.infer import (
    ForwardedHeaders,
    Inference,
    V2Request,
    classified,
    is_short,
    note,
    refuse_streams,
)
from sluice.gateway.api.v2.server import V2Server, parse_version
from sluice.gateway.api.v2.shared_memory import LongCopyError, write_output
from sluice.gateway.api.v2.trace import Trace
from sluice.gateway.calls import allowed_priority, current_call, note_session
from sluice.gateway.front.long_work import LONG_BYTES, has_short_inputs, prepare_inputs, run_aside, trim_later
from sluice.gateway.front.path_masking import client_message
from sluice.gateway.plane.models import STICKY_HEADER, find_session
from sluice.gateway.tenancy.access.control import TENANT_HEADER, check_tenant
from sluice.pipelines.text.model import text_model_of
from sluice.serving.model import Model
from sluice.serving.request import InferResponse, Parameter
from sluice.serving.tensors.tensor import Tensor

_COPIED_BYTES = 32 << 10
"""Most bytes of tensors that are copied into a message; longer ones follow it."""
_NOTHING = memoryview(b"")
_FINAL = "triton_final_response"
ONLY_FOR_STREAMS = "ModelInfer RPC doesn't support models with decoupled transaction policy"


class InferReader:
    """Reads messages into requests to models."""

    def __init__(
        self, server: V2Server, header_forward_pattern: str | None, session_headers: tuple[str, ...] = ()
    ) -> None:
        """`session_headers` are names of metadata, the first of which names a request's session."""
        self.access = server.calls.access
        self._session_headers = session_headers
        self.tracer = server.tracer
        self.server = server
        self._forwarded = ForwardedHeaders(header_forward_pattern)

    async def read(self, infer: InferMessage, context: Any, received_ns: int, *, is_unary: bool = False) -> V2Request:
        """Parse `infer`, which came at `received_ns` (perf_counter_ns), and begin its recording where it may have a
        timeline. Raises SluiceError for an unknown model, for one that takes no unary calls, and INVALID."""
        if infer.size_bytes >= LONG_BYTES:
            trim_later()
        model, version, key = self._choose_model(infer.header, context, is_unary=is_unary)
        if not self.tracer.is_exporting and self.tracer.records(model):
            method, request_id = ("ModelInfer", "") if is_unary else ("ModelStreamInfer", infer.header.id)
            open_root(self.tracer, method, request_id, received_ns)
        metadata = self._read_metadata(context, is_text=text_model_of(model) is not None)
        forwarded, memory = self._forwarded.choose(metadata), self.server.shared_memory
        parse = partial(parse_infer_request, infer, model, memory, forwarded, is_unary=is_unary)
        try:
            parsed = await run_aside(parse) if infer.contents else parse()
        except LongCopyError:
            parsed = await run_aside(parse)
        await prepare_inputs(parsed.request, model)
        parsed.version, parsed.key = version, key
        self._complete(parsed, metadata, received_ns)
        return parsed

    def read_plain(self, raw: bytes | memoryview, context: Any) -> V2Request | None:
        """Parse a short unary request, to a model without a timeline; None for another. Raises like `read`."""
        if len(raw) > INLINE_BYTES:
            return None
        infer = split_message(raw)
        received_ns = perf_counter_ns()
        model, version, key = self._choose_model(infer.header, context, is_unary=True)
        if text_model_of(model) is not None or self.tracer.records(model):
            return None
        metadata = self._read_metadata(context, is_text=False)
        try:
            forwarded = self._forwarded.choose(metadata)
            parsed = parse_infer_request(infer, model, self.server.shared_memory, forwarded, is_unary=True)
        except LongCopyError:
            return None
        if not has_short_inputs(parsed.request):
            return None
        parsed.version, parsed.key = version, key
        self._complete(parsed, metadata, received_ns)
        return parsed

    def _choose_model(
        self, message: "service_pb2.ModelInferRequest", context: Any, *, is_unary: bool
    ) -> tuple[Model, int, str]:
        """Return the model, the version that its client named, and the key that it sent to stay on one."""
        metadata = context.invocation_metadata() or ()
        key = next((_text(value) for name, value in metadata if name == STICKY_HEADER), "")
        version = parse_version(message.model_version)
        model = self.server.models.route(message.model_name, version, key)
        if is_unary:
            refuse_streams(model, ONLY_FOR_STREAMS)
        return model, version, key

    def _read_metadata(self, context: Any, *, is_text: bool) -> list[tuple[str, str]]:
        """Return the metadata of a call; none where its request, to a text model or another, needs nothing of them."""
        if not is_text and not self._forwarded and current_call.get() is None:
            return []
        return [(name, _text(value)) for name, value in context.invocation_metadata() or ()]

    def _complete(self, parsed: V2Request, metadata: list[tuple[str, str]], received_ns: int) -> None:
        """Add what a request has from its call."""
        if self.server.trace.is_on:
            parsed.received = (("GRPC_WAITREAD_END", received_ns),)
        sent, call = dict(metadata), current_call.get()
        if metadata:
            parsed.request.session, parsed.request.parent_session = find_session(sent, self._session_headers)
            note_session(parsed.request.session, parsed.request.parent_session)
        if call is not None:
            parsed.request.tenant = call.tenant
            parsed.request.priority = allowed_priority(parsed.request.priority or None)
        elif tenant := sent.get(TENANT_HEADER, ""):
            parsed.request.tenant = check_tenant(tenant)


class ModelInfer:
    """The unary call: one request, one response."""

    def __init__(self, reader: InferReader) -> None:
        self._reader = reader

    async def __call__(self, raw: bytes | memoryview, context: Any) -> WireMessage:
        """Answer one request. Raises SluiceError. Cancelling the call cancels the request."""
        parsed = await self._reader.read(split_message(raw), context, perf_counter_ns(), is_unary=True)
        call = _AwaitedCall()
        self._infer(parsed, call)
        try:
            answer = await call.answer
        except asyncio.CancelledError:
            if call.on_gone is not None:
                call.on_gone()
            raise
        message: WireMessage = await answer if asyncio.iscoroutine(answer) else answer
        return message

    def begin(self, raw: bytes | memoryview, call: GrpcCall) -> bool:
        """Begin to answer a plain request without a task; False for another. Raises SluiceError."""
        parsed = self._reader.read_plain(raw, call)
        if parsed is None:
            return False
        self._infer(parsed, call)
        return True

    def _infer(self, parsed: V2Request, call: "GrpcCall | _AwaitedCall") -> None:
        inference = _GrpcInference(parsed, call)
        if inference.start(self._reader.server, ONLY_FOR_STREAMS):
            call.on_gone = inference.cancel


class _AwaitedCall:
    """Takes the answer to a call for the task that waits for it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """The message, or a coroutine that returns it."""
        self.on_gone: Callable[[], None] | None = None

    def respond(self, message: WireMessage) -> None:
        self.on_gone = None  # it holds this object
        if not self.answer.done():
            self.answer.set_result(message)

    def fail(self, error: Exception) -> None:
        self.on_gone = None
        if not self.answer.done():
            self.answer.set_exception(error)

    def go_on(self, work: Coroutine[Any, Any, WireMessage]) -> None:
        self.on_gone = None
        if self.answer.done():
            work.close()
        else:
            self.answer.set_result(work)


class _GrpcInference(Inference):
    """A request whose answer goes to a unary call."""

    __slots__ = ("_call",)

    def __init__(self, parsed: V2Request, call: "GrpcCall | _AwaitedCall") -> None:
        super().__init__(parsed)
        self._call = call

    def respond(self, response: InferResponse, trace: Trace | None) -> None:
        try:
            note(trace, "GRPC_SEND_START")
            if is_short(response, self.parsed.plan):
                self._call.respond(_serialize(self.parsed, response))
            else:
                self._call.go_on(run_aside(lambda: _serialize(self.parsed, response)))
        except Exception as error:
            self._call.fail(error)
        if trace is not None:
            trace.finish()

    def fail(self, error: Exception) -> None:
        self._call.fail(error)


def _serialize(parsed: V2Request, response: InferResponse) -> WireMessage:
    message = service_pb2.ModelInferResponse()
    raws = _write_response(message, parsed, response)
    if sum(map(len, raws)) > _COPIED_BYTES:
        return add_raw_contents(message.SerializeToString(), raws)
    message.raw_output_contents.extend(map(bytes, raws))
    serialized: bytes = message.SerializeToString()
    return serialized


def _text(value: str | bytes) -> str:
    """Return a value of metadata as text; that of a binary key is bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def stream_message(parsed: V2Request, response: InferResponse) -> WireMessage:
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
    message: "service_pb2.ModelInferResponse", parsed: V2Request, response: InferResponse
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


def _write_output(message: "service_pb2.ModelInferResponse", parsed: V2Request, tensor: Tensor) -> memoryview:
    """Add an output to `message`, and return its values; none where they are in shared memory."""
    requested = parsed.plan.find(tensor.name)
    tensor = classified(parsed.model, tensor, requested)
    output = message.outputs.add()
    output.name = tensor.name
    output.datatype = tensor.datatype
    output.shape.extend(tensor.shape)
    if requested.window is not None:
        write_output(requested.window, tensor)
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
