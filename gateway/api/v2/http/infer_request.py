"""From the body of an infer request to an InferRequest: JSON, then bytes of the inputs that came as bytes.

What most clients send is parsed into types (`parse_plain_request`), in a third of the time of looking at each member.
Whatever is not of these types is left to `parse_infer_request`, which knows every member and Triton's words for every
fault.
"""

import re
from math import prod
from typing import Annotated, Any

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.infer_response import find_window, parse_outputs
from sluice.gateway.api.v2.http.json_document import (
    INLINE_BYTES,
    MAX_INT64,
    MAX_TEXT_CHARS,
    ArrayText,
    array_member,
    boolean,
    find,
    has,
    is_signed,
    members,
    parse_document,
    string,
    string_member,
    text,
    unsigned,
)
from sluice.gateway.api.v2.http.tensor_json import parse_tensor
from sluice.gateway.api.v2.infer import AS_BINARY, AS_JSON, OutputPlan, V2Request
from sluice.gateway.api.v2.shared_memory import LONG_COPY_BYTES, SharedMemoryRegistry, copy_window
from sluice.pipelines.text.model import text_model_of
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, Parameter, SequenceFlag
from sluice.serving.spec import TensorSpec
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES
from sluice.serving.tensors.tensor import Tensor, format_shape

PROTOCOL = "v2_http"
_COPIED_BYTES = 4096
"""Size below which a copy costs less than a view, and frees the body."""
_LEADING_INTEGER = re.compile(r"\s*[+-]?\d{1,18}", re.ASCII)


def parse_header_length(text: str, body_length: int) -> int:
    """Return how many bytes of the body are JSON, by Inference-Header-Content-Length. Raises INVALID.

    0 means that the body is the one input.
    """
    match = _LEADING_INTEGER.match(text)
    if match is None:
        raise invalid(
            "inference-header-content-length", f"Unable to parse Inference-Header-Content-Length, got: {text}"
        )
    length = int(match[0])
    if not 0 <= length <= body_length:
        message = f"inference header size should be in range (0, {body_length}), got: {text}"
        raise invalid("inference-header-content-length", message)
    return length


def takes_long(body: bytes | bytearray, json_length: int) -> bool:
    """Whether a thread is to read a body: its JSON is long, or it is one long input, which may be a string."""
    return json_length > INLINE_BYTES or (json_length == 0 and len(body) > LONG_COPY_BYTES)


def max_string_chars(model: Model) -> int | None:
    """Return the most characters of a string in a request to `model`; None for no limit."""
    return None if text_model_of(model) is None else MAX_TEXT_CHARS


def parse_infer_request(
    body: bytes | bytearray, json_length: int, model: Model, shared_memory: SharedMemoryRegistry
) -> V2Request:
    """Parse any request to `model` in `body`. Raises SluiceError in Triton's words, and LongCopyError."""
    if json_length == 0:
        return _parse_raw(body, model)
    document = parse_document(
        body if json_length == len(body) else memoryview(body)[:json_length], max_string_chars(model)
    )
    parsed = V2Request(model, InferRequest(inputs={}, protocol=PROTOCOL), OutputPlan())
    if has(document, "id"):
        parsed.request.id = text(string(find(document, "id"), "Unable to parse 'id': "), "id")
    if has(document, "parameters"):
        parameters = members(find(document, "parameters"), "failed to get request params.: ")
        for name, value in parameters.items():
            _parse_parameter(name, value, parsed.request, parsed.plan)
    binary_data = BinaryData(memoryview(body)[json_length:], model.name)
    for each in array_member(document, "inputs", "Unable to parse 'inputs': "):
        _parse_input(each, parsed.request, binary_data, shared_memory)
    binary_data.check_used_up()
    parsed.request.requested_outputs = parse_outputs(document, parsed.plan, shared_memory, parsed.request.log_prefix)
    return parsed


def _parse_parameter(name: str, value: object, request: InferRequest, plan: OutputPlan) -> None:
    prefix = f"Unable to parse '{name}': "
    match name:
        case "sequence_id":
            is_number = type(value) is int and value >= 0
            request.correlation_id = unsigned(value, prefix) if is_number else text(string(value, prefix), name)
        case "sequence_start":
            if boolean(value, prefix):
                request.sequence |= SequenceFlag.START
        case "sequence_end":
            if boolean(value, prefix):
                request.sequence |= SequenceFlag.END
        case "priority":
            request.priority = unsigned(value, prefix)
        case "timeout":
            request.timeout_us = unsigned(value, prefix)
        case "binary_data_output":
            plan.default = AS_BINARY if boolean(value, prefix) else AS_JSON
        case _ if name.startswith("triton_"):
            raise invalid(
                name,
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            )
        case _:
            request.parameters[name] = parse_custom_parameter(name, value)


def parse_custom_parameter(name: str, value: object) -> Parameter:
    """Return the value of a model's own parameter. Integers beyond 64 bits become doubles, as in Triton."""
    if isinstance(value, str):
        return text(value, text(name, "parameters"))
    if isinstance(value, bool | float):
        return value
    if type(value) is int:
        return value if is_signed(value) else float(value)
    complaint = f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    raise invalid(name, complaint)


class BinaryData:
    """The bytes behind the JSON, from which inputs take theirs in order."""

    def __init__(self, data: memoryview, model: str) -> None:
        self._data = data
        self._model = model

    def take(self, name: str, size_bytes: int) -> memoryview:
        missing = size_bytes - len(self._data)
        if missing > 0:
            raise invalid(
                name,
                f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{self._model}'",
            )
        taken, self._data = self._data[:size_bytes], self._data[size_bytes:]
        return taken

    def take_copy(self, name: str, size_bytes: int) -> bytes | memoryview:
        """Take like `take`; what is small is copied."""
        taken = self.take(name, size_bytes)
        return bytes(taken) if size_bytes < _COPIED_BYTES else taken

    def check_used_up(self) -> None:
        if len(self._data):
            raise invalid("inputs", f"unexpected additional input data for model '{self._model}'")


def _parse_input(
    each: object, request: InferRequest, binary_data: BinaryData, shared_memory: SharedMemoryRegistry
) -> None:
    parameters = find(each, "parameters")
    if parameters is not None or not has(each, "data"):
        _check_sources(each, parameters)
    name = string_member(each, "name", "Unable to parse 'name': ")
    datatype = string_member(each, "datatype", "Unable to parse 'datatype': ")
    dims = array_member(each, "shape", "Unable to parse 'shape': ")
    shape = tuple([unsigned(dim, "Unable to parse 'shape': ") for dim in dims])
    if name in request.inputs:
        raise already_exists(name, request)
    raw = None if parameters is None else _binary_value(name, datatype, parameters, binary_data, shared_memory)
    num_elements = count_elements(name, datatype, shape)
    if raw is None and num_elements == 0:
        raw = b""  # whatever `data` holds, as in Triton
    if raw is not None:
        request.inputs[name] = Tensor(name, datatype if datatype in DATA_TYPES else "<invalid>", shape, raw)
        return
    data = find(each, "data")
    if not isinstance(data, ArrayText):
        data = array_member(each, "data", "Unable to parse 'data': ")
    request.inputs[name] = parse_tensor(name, datatype, shape, data, num_elements)


def count_elements(name: str, datatype: str, shape: tuple[int, ...]) -> int:
    """Return how many elements have the shape. Raises INVALID for more elements or bytes than Triton counts."""
    num_elements = prod(shape) if shape else 0
    if num_elements > MAX_INT64:
        problem = f"shape {format_shape(shape)} causes total element count to exceed maximum size of {MAX_INT64}"
        raise invalid(name, f"invalid shape for input '{name}': {problem}")
    size_bytes = DATA_TYPES[datatype].itemsize if datatype in DATA_TYPES else 1
    if num_elements * size_bytes > MAX_INT64:
        product = f"element count ({num_elements}) * data type size ({size_bytes})"
        raise invalid(
            name, f"byte size overflow for input '{name}': {product} exceeds maximum allowed size ({MAX_INT64})"
        )
    return num_elements


def _binary_value(
    name: str, datatype: str, parameters: object, binary_data: BinaryData, shared_memory: SharedMemoryRegistry
) -> bytes | memoryview | None:
    """Return an input's data from behind the JSON or from shared memory; None where it is in the JSON."""
    if has(parameters, "binary_data_size"):
        size_bytes = unsigned(find(parameters, "binary_data_size"), "Unable to parse 'binary_data_size': ")
        return binary_data.take_copy(name, size_bytes)
    window = find_window(parameters, shared_memory)
    if window is None:
        return None
    # A client may change its memory at any time: lengths that were checked must stay as they were.
    return copy_window(window) if datatype == "BYTES" else window.toreadonly()


def already_exists(name: str, request: InferRequest) -> SluiceError:
    return SluiceError(ErrorCode.ALREADY_EXISTS, f"{request.log_prefix}input '{name}' already exists in request")


def _check_sources(each: object, parameters: object) -> None:
    """Raise INVALID where an input has no source of data or several."""
    sources = {
        "data": has(each, "data"),
        "binary_data_size": has(parameters, "binary_data_size"),
        "shared_memory_region": has(parameters, "shared_memory_region"),
    }
    sources_set = [f"'{name}'" for name, is_given in sources.items() if is_given]
    if len(sources_set) != 1:
        complaint = (
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But "
        )
        raise invalid("inputs", complaint + ("set " + " ".join(sources_set) if sources_set else "no field is set"))


def _parse_raw(body: bytes | bytearray, model: Model) -> V2Request:
    """Parse a raw binary request: the body is the one input, whose type is the model's.

    Raises INVALID where its shape does not follow from the length.
    """
    model_spec = model.spec
    request = InferRequest(inputs={}, protocol=PROTOCOL)
    if len(model_spec.inputs) != 1:
        complaint = (
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(model_spec.inputs)} inputs in "
            f"'{model_spec.name}' model configuration"
        )
        raise invalid("inputs", request.log_prefix + complaint)
    (spec,) = model_spec.inputs.values()
    dims, raw = _deduce_raw(body, spec, request)
    shape = (1, *dims) if model_spec.max_batch_size > 0 else dims
    tensor = Tensor(spec.name, spec.data_type.name, shape, raw)
    expected = spec.data_type.itemsize * tensor.num_elements
    if spec.data_type is not BYTES and expected != len(body):
        complaint = f"input byte size mismatch for input 'raw_input' for model '{model_spec.name}'."
        raise invalid(spec.name, f"{request.log_prefix}{complaint} Expected {expected}, got {len(body)}")
    request.inputs[spec.name] = tensor
    return V2Request(model, request, OutputPlan(default=AS_BINARY))


def _deduce_raw(
    body: bytes | bytearray, spec: TensorSpec, request: InferRequest
) -> tuple[tuple[int, ...], bytes | bytearray | memoryview]:
    """Return the dims without a batch, and the wire form."""
    num_fixed = prod(dim for dim in spec.dims if dim != -1)
    num_free = spec.dims.count(-1)
    if num_free > 1:
        complaint = "can not be deduced because there are more than one variable-sized dimension"
        raise invalid(spec.name, f"{request.log_prefix}The shape of the raw input '{spec.name}' {complaint}")
    if spec.data_type is BYTES:
        if num_free or num_fixed != 1:
            complaint = f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
            raise invalid(spec.name, request.log_prefix + complaint)
        return spec.dims, byte_strings.pack_one(body)
    size = len(body) // (num_fixed * spec.data_type.itemsize) if num_fixed else 0
    return tuple(size if dim == -1 else dim for dim in spec.dims), body


_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]


class _InputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data_size: _Unsigned


class _Input(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    shape: tuple[_Unsigned, ...]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: _InputParameters | msgspec.UnsetType = msgspec.UNSET


class _OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data: bool = False


class _Output(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Parameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data_output: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] = []
    parameters: _Parameters = _Parameters()


_decode = msgspec.json.Decoder(_Document).decode


def parse_plain_request(body: bytes | bytearray, json_length: int, model: Model) -> V2Request | None:
    """Return the request to `model`; None for one that has other members, or that may be at fault.

    Raises SluiceError for some faults, in the same words as `parse_infer_request`.
    """
    is_json = json_length == len(body)
    try:
        document = _decode(body if is_json else memoryview(body)[:json_length])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    binary_data = None if is_json else BinaryData(memoryview(body)[json_length:], model.name)
    inputs: dict[str, Tensor] = {}
    for each in document.inputs:
        tensor = _parse_plain_input(each, binary_data)
        if tensor is None or each.name in inputs:
            return None
        inputs[each.name] = tensor
    if binary_data is not None:
        binary_data.check_used_up()
    plan = OutputPlan(AS_BINARY if document.parameters.binary_data_output else AS_JSON)
    for output in document.outputs:
        plan.named[output.name] = AS_BINARY if output.parameters.binary_data else AS_JSON
    if len(plan.named) != len(document.outputs):
        return None
    return V2Request(model, InferRequest(inputs, document.id, tuple(plan.named), protocol=PROTOCOL), plan)


def _parse_plain_input(each: _Input, binary_data: BinaryData | None) -> Tensor | None:
    num_elements = count_elements(each.name, each.datatype, each.shape)
    if isinstance(each.parameters, _InputParameters):
        if each.data is not msgspec.UNSET or binary_data is None or each.datatype not in DATA_TYPES:
            return None
        raw = binary_data.take_copy(each.name, each.parameters.binary_data_size)
        return Tensor(each.name, each.datatype, each.shape, raw)
    if each.data is msgspec.UNSET or num_elements == 0:
        return None
    return parse_tensor(each.name, each.datatype, each.shape, each.data, num_elements)
