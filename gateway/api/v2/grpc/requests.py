"""From a ModelInferRequest message to a request to a model: parameters, inputs and requested outputs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.grpc.messages import InferMessage, split_contents
from sluice.gateway.api.v2.infer import AS_BINARY, OutputForm, OutputPlan, RequestedOutput, V2Request
from sluice.gateway.api.v2.shared_memory import SharedMemoryRegistry, copy_window
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, SequenceFlag
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Buffer, Tensor

PROTOCOL = "v2_grpc"
"""Label of these requests in the metrics."""
EMPTY_FINAL = "triton_enable_empty_final_response"
"""Parameter that requests a last, empty message for a stream's request whose last response did not end it."""
MAX_CONTENTS_BYTES = 64 << 20
"""Longest tensor in typed contents, as bytes: on the wire it may have an eighth of them."""
_REGION, _OFFSET, _BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_UINT64_MASK = 2**64 - 1
"""Mask for integers that Triton reads as unsigned."""
_KINDS = ("bool_param", "int64_param", "string_param", "double_param")
_CONTENT_TYPES = {
    "bool_contents": ("BOOL", ("BOOL",)),
    "int_contents": ("INT32", ("INT32", "INT16", "INT8")),
    "int64_contents": ("INT64", ("INT64",)),
    "uint_contents": ("UINT32", ("UINT32", "UINT16", "UINT8")),
    "uint64_contents": ("UINT64", ("UINT64",)),
    "fp32_contents": ("FP32", ("FP32",)),
    "fp64_contents": ("FP64", ("FP64",)),
    "bytes_contents": ("BYTES", ("BYTES",)),
}
"""By field of InferTensorContents: its own type, and the types of tensors that it may carry."""


def parse_infer_request(
    infer: InferMessage,
    model: Model,
    memory: SharedMemoryRegistry,
    forwarded: Mapping[str, str] | None = None,
    *,
    is_unary: bool = False,
) -> V2Request:
    """Parse the request to `model` in `infer`. `forwarded` metadata become parameters, over the message's own.

    Raises INVALID in Triton's words, and whatever shared memory raises.
    """
    message = infer.header
    request = InferRequest({}, id=message.id, protocol=PROTOCOL, takes_stream=not is_unary)
    parsed = V2Request(model, request, OutputPlan(AS_BINARY))
    if message.parameters:
        parsed.wants_empty_final = _parse_parameters(message.parameters, request)
    _parse_inputs(infer, request, memory)
    if message.outputs:
        _parse_outputs(message, parsed, memory)
    if forwarded:
        request.parameters.update(forwarded)
    parsed.is_decoupled = not is_unary and model.is_decoupled_for(request)
    return parsed


def _parse_parameters(parameters: Mapping[str, Any], request: InferRequest) -> bool:
    """Put `parameters` into `request`. Return whether they request an empty final response. Raises INVALID."""
    wants_empty_final = False
    for name, parameter in parameters.items():
        if name == EMPTY_FINAL:
            wants_empty_final = _read(name, parameter, "bool_param")
        else:
            _parse_parameter(name, parameter, request)
    return wants_empty_final


def _parse_parameter(name: str, parameter: Any, request: InferRequest) -> None:
    match name:
        case "sequence_id":
            value = _read(name, parameter, "int64_param", "string_param")
            request.correlation_id = value & _UINT64_MASK if isinstance(value, int) else value
        case "sequence_start":
            if _read(name, parameter, "bool_param"):
                request.sequence |= SequenceFlag.START
        case "sequence_end":
            if _read(name, parameter, "bool_param"):
                request.sequence |= SequenceFlag.END
        case "priority":
            request.priority = _read(name, parameter, "int64_param", "uint64_param")
            if request.priority < 0:
                raise _invalid_parameter("invalid value for 'priority', expected value >= 0.")
        case "timeout":
            request.timeout_us = _read(name, parameter, "int64_param") & _UINT64_MASK
        case _ if name.startswith("triton_"):
            raise _invalid_parameter(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        case _:
            kind = parameter.WhichOneof("parameter_choice")
            if kind not in _KINDS:
                raise _wrong_kind(name, "int64_param, bool_param, or string_param")
            request.parameters[name] = getattr(parameter, kind)


def _read(name: str, parameter: Any, *kinds: str) -> Any:
    """Return the value of a parameter. Raises INVALID where it is of none of `kinds`."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in kinds:
        raise _wrong_kind(name, " or ".join(kinds))
    return getattr(parameter, kind)


def _parse_inputs(infer: InferMessage, request: InferRequest, memory: SharedMemoryRegistry) -> None:
    message, raw = infer.header, infer.raw
    next_raw = 0
    inputs = request.inputs
    for number, each in enumerate(message.inputs):
        name = each.name
        if name in inputs:
            raise invalid(name, f"{request.log_prefix}input '{name}' already exists in request")
        region = _parse_region(each.parameters, name) if each.parameters else None
        value: Buffer
        if region is not None:
            if each.HasField("contents"):
                reason = "unexpected 'content' provided when using shared memory"
                raise invalid(name, f"{reason} for input tensor '{name}' for model '{message.model_name}'")
            value = memory.read(*region)
            if each.datatype == "BYTES":  # a client may change its memory: lengths that were checked must stay
                value = copy_window(value)
        elif each.HasField("contents"):
            if raw:
                reason = "contents field must not be specified when using raw_input_contents"
                raise invalid(name, f"{reason} for '{name}' for model '{message.model_name}'")
            long_contents = infer.contents.get(number)
            pieces = [each.contents] if long_contents is None else split_contents(long_contents)
            value = _pack_contents(each, pieces, message.model_name)
        elif next_raw < len(raw):
            value = raw[next_raw]
            next_raw += 1
        else:
            reason = f"unable to find data for input tensor '{name}' for model '{message.model_name}' in request."
            raise invalid(name, reason)
        inputs[name] = Tensor(name, each.datatype, each.shape, raw=value)


def _pack_contents(
    tensor: "service_pb2.ModelInferRequest.InferInputTensor",
    pieces: "Iterable[service_pb2.InferTensorContents]",
    model: str,
) -> bytes | bytearray:
    """Return the raw bytes of a tensor with contents. Raises INVALID for contents of another type."""
    packed, num_strings, name = bytearray(), 0, ""
    for contents in pieces:
        present = [field.name for field, _ in contents.ListFields()]
        if not present:
            continue
        own_type, allowed = _CONTENT_TYPES[present[0]]
        if tensor.datatype not in allowed:
            raise _unexpected(tensor, model, f" of type '{own_type}', expected datatype '{tensor.datatype}'")
        if len(present) > 1 or name not in ("", present[0]):
            raise _unexpected(tensor, model, ", binary data was already supplied.")
        name = present[0]
        values = getattr(contents, name)
        if own_type != "BYTES":
            packed += _pack(values, own_type, tensor, model)
            if len(packed) > MAX_CONTENTS_BYTES:
                what = f": it has over {MAX_CONTENTS_BYTES} bytes; send it in raw_input_contents"
                raise _unexpected(tensor, model, what)
            continue
        num_strings += len(values)
        if num_strings > byte_strings.MAX_ELEMENTS:
            raise _unexpected(tensor, model, f": it has more than {byte_strings.MAX_ELEMENTS} string elements")
        packed += byte_strings.pack(values)
    return packed


def _pack(values: Any, own_type: str, tensor: Any, model: str) -> bytes:
    """Pack numbers. Narrow integers travel in wider fields; a misfit is refused, where Triton overflows."""
    array = np.array(values, DATA_TYPES[own_type].dtype)
    if tensor.datatype == own_type:
        return array.tobytes()
    narrow = array.astype(DATA_TYPES[tensor.datatype].dtype)
    if not np.array_equal(narrow, array):
        value = array[narrow != array][0]
        raise _unexpected(tensor, model, f": {value} is out of range for datatype '{tensor.datatype}'")
    return narrow.tobytes()


def _unexpected(tensor: Any, model: str, what: str) -> SluiceError:
    message = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}'{what}"
    return invalid(tensor.name, message)


def _parse_outputs(message: "service_pb2.ModelInferRequest", parsed: V2Request, memory: SharedMemoryRegistry) -> None:
    names: dict[str, None] = {}
    for each in message.outputs:
        name = each.name
        if name in names:
            raise invalid(name, f"{parsed.request.log_prefix}output '{name}' already exists in request")
        names[name] = None
        if not each.parameters:
            continue
        region, classes = _parse_region(each.parameters, name), _parse_num_classes(each.parameters)
        if region is not None and classes:
            raise invalid(name, "output can't set both 'shared_memory_region' and 'classification'")
        if region is not None:
            window = memory.window(*region)
            parsed.plan.named[name] = RequestedOutput(OutputForm.SHARED_MEMORY, window=window)
        if classes:
            parsed.plan.named[name] = RequestedOutput(OutputForm.BINARY, classes)
    parsed.request.requested_outputs = tuple(names)


def _parse_region(parameters: Mapping[str, Any], tensor: str) -> tuple[str, int, int] | None:
    """Return region, offset and size in bytes of a tensor in shared memory; None for one that is elsewhere."""
    region = _tensor_parameter(parameters, _REGION, "string_param", tensor)
    offset = _tensor_parameter(parameters, _OFFSET, "int64_param", tensor)
    byte_size = _tensor_parameter(parameters, _BYTE_SIZE, "int64_param", tensor)
    if region is None:
        for name, value in ((_OFFSET, offset), (_BYTE_SIZE, byte_size)):
            if value is not None:
                message = f"'{name}' can not be specified without '{_REGION}' parameter for tensor '{tensor}'"
                raise invalid(tensor, message)
        return None
    if byte_size is None:
        message = f"'{_BYTE_SIZE}' must be specified along with '{_REGION}' parameter for tensor '{tensor}'"
        raise invalid(tensor, message)
    return region, offset or 0, byte_size


def _parse_num_classes(parameters: Mapping[str, Any]) -> int:
    """Return the number of classes that an output is requested as; 0 without classification."""
    if "classification" not in parameters:
        return 0
    parameter = parameters["classification"]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise _invalid_parameter("invalid value type for 'classification' parameter, expected int64_param")
    count: int = parameter.int64_param
    if count <= 0:
        raise _invalid_parameter("invalid value for 'classification' parameter, expected >= 0")
    return count


def _tensor_parameter(parameters: Mapping[str, Any], name: str, kind: str, tensor: str) -> Any:
    """Return a tensor's parameter `name`; None where it is absent. Raises INVALID where it is not of `kind`."""
    if name not in parameters:
        return None
    parameter = parameters[name]
    if parameter.WhichOneof("parameter_choice") != kind:
        raise _invalid_parameter(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")
    return getattr(parameter, kind)


def _wrong_kind(name: str, expected: str) -> SluiceError:
    return _invalid_parameter(f"invalid value type for '{name}' parameter, expected {expected}.")


def _invalid_parameter(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
