"""From a ModelInferRequest to what a model is asked."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from gateway.grpc import contents
from gateway.grpc.parameters import of_tensor, read_parameters
from gateway.v2.shared_memory import SharedMemoryRegistry
from serving.model import Model
from serving.request import InferRequest
from serving.tensors.tensor import Buffer, Tensor
from sluice.errors import ErrorCode, SluiceError

PROTOCOL = "v2_grpc"
"""The label of these requests in the metrics."""

_REGION, _OFFSET, _BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"


@dataclass(slots=True)
class Asked:
    """A request, and what of it is for the protocol alone.

    `windows` are where outputs go that shall lie in shared memory, `classes` the number of classes that outputs
    shall be given as; both by the output's name.
    """

    model: Model
    request: InferRequest
    is_decoupled: bool
    wants_empty_final: bool = False
    windows: dict[str, memoryview] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)


def read_request(
    message: "service_pb2.ModelInferRequest",
    model: Model,
    memory: SharedMemoryRegistry,
    forwarded: Iterable[tuple[str, str]] = (),
) -> Asked:
    """What `message` asks of `model`; `forwarded` are metadata that go along as parameters, over the message's own.

    Raises INVALID in Triton's words, and what shared memory raises.
    """
    request = InferRequest({}, id=message.id, protocol=PROTOCOL)
    asked = Asked(model, request, is_decoupled=False)
    if message.parameters:
        asked.wants_empty_final = read_parameters(message.parameters, request)
    _read_inputs(message, request, memory)
    if message.outputs:
        _read_outputs(message, asked, memory)
    request.parameters.update(forwarded)
    asked.is_decoupled = model.is_decoupled_for(request)
    return asked


def _read_inputs(message: "service_pb2.ModelInferRequest", request: InferRequest, memory: SharedMemoryRegistry) -> None:
    raw = message.raw_input_contents
    num_raw = len(raw)
    next_raw = 0
    inputs = request.inputs
    for each in message.inputs:
        name = each.name
        if name in inputs:
            raise _invalid(name, f"{request.log_prefix}input '{name}' already exists in request")
        place = _place(each.parameters, name) if each.parameters else None
        value: Buffer
        if place is not None:
            value = _from_memory(each, place, memory, message.model_name)
        elif each.HasField("contents"):
            value = _from_contents(each, num_raw > 0, message.model_name)
        elif next_raw < num_raw:
            value = raw[next_raw]
            next_raw += 1
        else:
            reason = f"unable to find data for input tensor '{name}' for model '{message.model_name}' in request."
            raise _invalid(name, reason)
        inputs[name] = Tensor(name, each.datatype, each.shape, raw=value)


def _from_contents(each: Any, has_raw: bool, model: str) -> bytes:
    if has_raw:
        message = "contents field must not be specified when using raw_input_contents"
        raise _invalid(each.name, f"{message} for '{each.name}' for model '{model}'")
    return contents.wire_form(each, model)


def _from_memory(each: Any, place: tuple[str, int, int], memory: SharedMemoryRegistry, model: str) -> memoryview:
    if each.HasField("contents"):
        message = "unexpected 'content' provided when using shared memory"
        raise _invalid(each.name, f"{message} for input tensor '{each.name}' for model '{model}'")
    return memory.read(*place)


def _read_outputs(message: "service_pb2.ModelInferRequest", asked: Asked, memory: SharedMemoryRegistry) -> None:
    names = []
    for each in message.outputs:
        name = each.name
        names.append(name)
        if not each.parameters:
            continue
        place, classes = _place(each.parameters, name), _classes(each.parameters)
        if place is not None and classes:
            raise _invalid(name, "output can't set both 'shared_memory_region' and 'classification'")
        if place is not None:
            asked.windows[name] = memory.window(*place)
        if classes:
            asked.classes[name] = classes
    asked.request.requested_outputs = tuple(names)


def _place(parameters: Mapping[str, Any], tensor: str) -> tuple[str, int, int] | None:
    """Region, offset and size in bytes of a tensor in shared memory; None for one that is not there."""
    region = of_tensor(parameters, _REGION, "string_param", tensor)
    offset = of_tensor(parameters, _OFFSET, "int64_param", tensor)
    byte_size = of_tensor(parameters, _BYTE_SIZE, "int64_param", tensor)
    if region is None:
        for name, value in ((_OFFSET, offset), (_BYTE_SIZE, byte_size)):
            if value is not None:
                message = f"'{name}' can not be specified without '{_REGION}' parameter for tensor '{tensor}'"
                raise _invalid(tensor, message)
        return None
    if byte_size is None:
        message = f"'{_BYTE_SIZE}' must be specified along with '{_REGION}' parameter for tensor '{tensor}'"
        raise _invalid(tensor, message)
    return region, offset or 0, byte_size


def _classes(parameters: Mapping[str, Any]) -> int:
    """How many classes an output shall be given as; 0 for one that shall be given as it is."""
    if "classification" not in parameters:
        return 0
    parameter = parameters["classification"]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise _invalid(None, "invalid value type for 'classification' parameter, expected int64_param")
    count: int = parameter.int64_param
    if count <= 0:
        raise _invalid(None, "invalid value for 'classification' parameter, expected >= 0")
    return count


def _invalid(param: str | None, message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message, param=param)
