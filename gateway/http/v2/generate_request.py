"""From the JSON of a generate request to an InferRequest: keys that are inputs become tensors, others parameters."""

from math import prod

from gateway.http.request import MAX_TIMEOUT_S
from gateway.http.v2.infer_request import PROTOCOL, already_exists, max_string_chars, parse_custom_parameter
from gateway.http.v2.json_document import find, find_repeated, has, members, mistyped, string, text, unreadable
from gateway.http.v2.long_document import parse_document
from gateway.http.v2.tensor_json import check_strings, count_elements, parse_tensor
from pipelines.llm.model import LlmModel
from serving.model import Model
from serving.request import InferRequest
from serving.spec import TensorSpec
from serving.tensors.datatypes import BYTES
from sluice.errors import SluiceError, invalid

_NESTED = "parameters"
"""Key of an object whose keys count as if they stood beside it."""

_SCHEDULING = {
    "priority": (range(-(2**31), 2**31), "a 32-bit integer (lower runs earlier)"),
    "timeout": (
        range(int(MAX_TIMEOUT_S * 1e6) + 1),
        f"a whole number of microseconds from 0 (none) to {MAX_TIMEOUT_S * 1e6:.0f}",
    ),
}
"""Parameters that schedule an LLM's requests, as on its other routes. For other models they are plain parameters."""


def parse_generate_request(body: bytes | bytearray, model: Model, is_streaming: bool) -> InferRequest:
    """Parse the request to `model` in `body`. Raises SluiceError in Triton's words."""
    document = parse_document(body, max_string_chars(model))
    request = InferRequest(inputs={}, protocol=PROTOCOL, streams_by_default=is_streaming)
    for name in find_repeated(document, body):
        if name in model.spec.inputs:
            raise already_exists(name, request)
        raise invalid(name, f"{request.log_prefix}'{name}' already exists in request")
    if has(document, "id"):
        request.id = text(string(find(document, "id"), "Unable to parse 'id': "), "id")
    for name, value in members(document).items():
        if name != _NESTED:
            _parse_member(name, value, request, model)
            continue
        if name in model.spec.inputs:
            raise invalid(name, f"Keyword '{name}' for nested schema also given as input tensor name")
        if not isinstance(value, dict):
            raise unreadable(f"Expected JSON object for keyword: '{name}': " + mistyped("object"))
        _parse_nested(value, request, model)
    return request


def _parse_nested(nested: dict[str, object], request: InferRequest, model: Model) -> None:
    for name, value in nested.items():
        try:
            _parse_member(name, value, request, model)
        except SluiceError as error:
            raise SluiceError(error.code, f"Converting keyword: '{_NESTED}': {error.message}") from None


def _parse_member(name: str, value: object, request: InferRequest, model: Model) -> None:
    spec = model.spec.inputs.get(name)
    if spec is None:
        if name in _SCHEDULING and isinstance(model, LlmModel):
            _parse_scheduling(name, value, request)
        else:
            request.parameters[name] = parse_custom_parameter(name, value)
        return
    dims = (-1, *spec.dims) if model.spec.max_batch_size > 0 else spec.dims
    if spec.data_type is BYTES:
        check_strings(value)  # before the shape, as Triton, which adds up their lengths first
    num_elements = count_elements(value)
    shape = _shape(spec, dims, num_elements)
    tensor = parse_tensor(name, spec.data_type.name, shape, value, num_elements)
    if name in request.inputs:
        raise already_exists(name, request)
    request.inputs[name] = tensor


def _parse_scheduling(name: str, value: object, request: InferRequest) -> None:
    allowed, words = _SCHEDULING[name]
    if type(value) is not int or value not in allowed:
        raise invalid(name, f"parameter '{name}' must be {words}")
    if name == "priority":
        request.priority = value
    else:
        request.timeout_us = value


def _shape(spec: TensorSpec, dims: tuple[int, ...], num_elements: int) -> tuple[int, ...]:
    """Return `dims` with the last free one as long as the elements need, and other free ones 1.

    Raises INVALID where `num_elements` cannot be shaped so.
    """
    num_fixed = prod(dim for dim in dims if dim != -1)
    if num_fixed == 0 or num_elements % num_fixed or (-1 not in dims and num_elements != num_fixed):
        raise invalid(spec.name, f"The schema can not convert input '{spec.name}' to tensor with proper shape")
    left, shape = num_elements // num_fixed, []
    for dim in reversed(dims):
        shape.append(left if dim == -1 else dim)
        if dim == -1:
            left = 1
    return tuple(reversed(shape))
