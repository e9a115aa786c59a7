"""From the body of an infer request to an InferRequest: JSON, then bytes of the inputs that came as bytes."""

import asyncio
import re
from dataclasses import dataclass, field
from math import prod

from gateway.http.v2.json_document import array_member, find, has, parse, string, string_member, text, unsigned
from gateway.http.v2.outputs import AS_BINARY, OutputPlan, read_outputs, window_of
from gateway.http.v2.parameters import read_parameters
from gateway.http.v2.tensor_json import tensor_of
from gateway.v2.shared_memory import SharedMemoryRegistry
from serving.model import Model
from serving.request import InferRequest
from serving.spec import ModelSpec, TensorSpec
from serving.tensors import byte_strings
from serving.tensors.datatypes import BYTES, DATA_TYPES
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

PROTOCOL = "v2_http"
_COPIED_BYTES = 4096
"""Below this a copy costs less than a view, and lets the body go."""
LARGE_BYTES = 1 << 20
"""Length of JSON that is read on a thread: it would hold up every other request."""
_LEADING_INTEGER = re.compile(r"\s*[+-]?\d{1,18}", re.ASCII)


@dataclass(slots=True)
class InferBody:
    """What the client asks, and how it wants the answer."""

    request: InferRequest
    plan: OutputPlan = field(default_factory=OutputPlan)


def header_length(text: str, body_length: int) -> int:
    """How much of the body is JSON, by Inference-Header-Content-Length. Raises INVALID.

    Like Triton's `atoi`: what is no number is 0, which says that the body is the one input.
    """
    match = _LEADING_INTEGER.match(text)
    length = int(match[0]) if match is not None else 0
    if not 0 <= length <= body_length:
        message = f"inference header size should be in range (0, {body_length}), got: {text}"
        raise invalid("inference-header-content-length", message)
    return length


async def read_infer_anywhere(
    body: bytes, json_length: int, model: Model, shared_memory: SharedMemoryRegistry
) -> InferBody:
    """As `read_infer`; what takes long is done on a thread, unless it needs the registry, which is the loop's."""
    if json_length < LARGE_BYTES or body.find(b"shared_memory_region", 0, json_length) >= 0:
        return read_infer(body, json_length, model, shared_memory)
    return await asyncio.to_thread(read_infer, body, json_length, model, shared_memory)


def read_infer(body: bytes, json_length: int, model: Model, shared_memory: SharedMemoryRegistry) -> InferBody:
    """The request to `model` in `body`. Raises SluiceError in Triton's words."""
    if json_length == 0:
        return _raw(body, model.spec)
    document = parse(body if json_length == len(body) else memoryview(body)[:json_length])
    read = InferBody(InferRequest(inputs={}, protocol=PROTOCOL))
    if has(document, "id"):
        read.request.id = text(string(find(document, "id"), "Unable to parse 'id': "), "id")
    read_parameters(document, read.request, read.plan)
    rest = _Rest(memoryview(body)[json_length:], model.name)
    for each in array_member(document, "inputs", "Unable to parse 'inputs': "):
        _read_input(each, read.request, rest, shared_memory)
    rest.check_used_up()
    read.request.requested_outputs = read_outputs(document, read.plan, shared_memory)
    return read


class _Rest:
    """The bytes behind the JSON, of which inputs take theirs in order."""

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

    def check_used_up(self) -> None:
        if len(self._data):
            raise invalid("inputs", f"unexpected additional input data for model '{self._model}'")


def _read_input(each: object, request: InferRequest, rest: _Rest, shared_memory: SharedMemoryRegistry) -> None:
    parameters = find(each, "parameters")
    if parameters is not None or not has(each, "data"):
        _check_sources(each, parameters)
    name = string_member(each, "name", "Unable to parse 'name': ")
    datatype = string_member(each, "datatype", "Unable to parse 'datatype': ")
    dims = array_member(each, "shape", "Unable to parse 'shape': ")
    shape = tuple([unsigned(dim, "Unable to parse 'shape': ") for dim in dims])
    if name in request.inputs:
        raise already_exists(name, request)
    raw = None if parameters is None else _elsewhere(name, datatype, parameters, rest, shared_memory)
    num_elements = prod(shape) if shape else 0
    if raw is None and num_elements == 0:
        raw = b""  # whatever `data` holds, as in Triton
    if raw is not None:
        request.inputs[name] = Tensor(name, datatype if datatype in DATA_TYPES else "<invalid>", shape, raw)
        return
    data = array_member(each, "data", "Unable to parse 'data': ")
    request.inputs[name] = tensor_of(name, datatype, shape, data, num_elements)


def _elsewhere(
    name: str, datatype: str, parameters: object, rest: _Rest, shared_memory: SharedMemoryRegistry
) -> bytes | memoryview | None:
    """The data of an input that has it behind the JSON or in shared memory; None where it is in the JSON."""
    if has(parameters, "binary_data_size"):
        size_bytes = unsigned(find(parameters, "binary_data_size"), "Unable to parse 'binary_data_size': ")
        taken = rest.take(name, size_bytes)
        return bytes(taken) if size_bytes < _COPIED_BYTES else taken
    window = window_of(parameters, shared_memory)
    if window is None:
        return None
    # A client may change its memory while we look: lengths that were checked must stay as they were.
    return bytes(window) if datatype == "BYTES" else window.toreadonly()


def already_exists(name: str, request: InferRequest) -> SluiceError:
    return SluiceError(ErrorCode.ALREADY_EXISTS, f"{request.log_prefix}input '{name}' already exists in request")


def _check_sources(each: object, parameters: object) -> None:
    """Raise INVALID where an input does not say exactly once where its data is."""
    sources = {
        "data": has(each, "data"),
        "binary_data_size": has(parameters, "binary_data_size"),
        "shared_memory_region": has(parameters, "shared_memory_region"),
    }
    given = [f"'{name}'" for name, is_given in sources.items() if is_given]
    if len(given) != 1:
        complaint = (
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            "'shared_memory_region' in 'parameters'. But "
        )
        raise invalid("inputs", complaint + ("set " + " ".join(given) if given else "no field is set"))


# -- a raw binary request: the body is the one input


def _raw(body: bytes, spec: ModelSpec) -> InferBody:
    """Shape and type are the model's. Raises INVALID where they cannot be told from the length."""
    request = InferRequest(inputs={}, protocol=PROTOCOL)
    if len(spec.inputs) != 1:
        complaint = (
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} inputs in "
            f"'{spec.name}' model configuration"
        )
        raise invalid("inputs", request.log_prefix + complaint)
    (wanted,) = spec.inputs.values()
    dims, raw = _deduced(body, wanted, request)
    shape = (1, *dims) if spec.max_batch_size > 0 else dims
    tensor = Tensor(wanted.name, wanted.data_type.name, shape, raw)
    expected = wanted.data_type.itemsize * tensor.num_elements
    if wanted.data_type is not BYTES and expected != len(body):
        complaint = f"input byte size mismatch for input 'raw_input' for model '{spec.name}'."
        raise invalid(wanted.name, f"{request.log_prefix}{complaint} Expected {expected}, got {len(body)}")
    request.inputs[wanted.name] = tensor
    return InferBody(request, OutputPlan(otherwise=AS_BINARY))


def _deduced(body: bytes, wanted: TensorSpec, request: InferRequest) -> tuple[tuple[int, ...], bytes]:
    """The dims without a batch, and the wire form."""
    num_fixed = prod(dim for dim in wanted.dims if dim != -1)
    num_free = wanted.dims.count(-1)
    if num_free > 1:
        complaint = "can not be deduced because there are more than one variable-sized dimension"
        raise invalid(wanted.name, f"{request.log_prefix}The shape of the raw input '{wanted.name}' {complaint}")
    if wanted.data_type is BYTES:
        if num_free or num_fixed != 1:
            complaint = f"For BYTE datatype raw input '{wanted.name}', the model must have input shape [1]"
            raise invalid(wanted.name, request.log_prefix + complaint)
        return wanted.dims, byte_strings.pack([body])
    size = len(body) // (num_fixed * wanted.data_type.itemsize) if num_fixed else 0
    return tuple(size if dim == -1 else dim for dim in wanted.dims), body
