"""From the JSON of a generate request to an InferRequest: keys that are inputs become tensors, others parameters."""

import json
from codecs import BOM_UTF8
from contextlib import suppress
from math import prod

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.infer_request import PROTOCOL, already_exists, max_string_chars, parse_custom_parameter
from sluice.gateway.api.v2.http.json_document import find, has, members, mistyped, string, text, unreadable
from sluice.gateway.api.v2.http.long_document import INLINE_BYTES, parse_document
from sluice.gateway.api.v2.http.tensor_json import check_strings, count_elements, parse_tensor
from sluice.gateway.front.http.request import MAX_TIMEOUT_S
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.spec import TensorSpec
from sluice.serving.tensors.datatypes import BYTES

_NESTED = "parameters"
"""Key of an object whose keys count as if they stood beside it."""

_MAX_LONG_KEYS = 64
"""Most keys of a long request: each is searched in all of it."""
_MAX_SPACE = 64
_SEARCHED_BYTES = 1 << 20

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


def find_repeated(document: object, body: bytes | bytearray) -> list[str]:
    """Return the keys that stand more than once in one object of `document`, which was parsed from `body`, by their
    second places.

    The objects of a long body count as one: it is searched, because a parser would hold the interpreter's lock for all
    of it. Raises INVALID for a long body with many keys.
    """
    if len(body) <= INLINE_BYTES:
        return _find_in_objects(body)
    names = [name for each in (document, find(document, _NESTED)) if isinstance(each, dict) for name in each]
    if len(names) > _MAX_LONG_KEYS:
        text = f"a body of more than {INLINE_BYTES} bytes may have {_MAX_LONG_KEYS} keys, got {len(names)}"
        raise SluiceError(ErrorCode.INVALID, text)
    return [name for name in names if _stands_twice(body, f'"{name}"'.encode("utf-8", "surrogateescape"))]


def _find_in_objects(body: bytes | bytearray) -> list[str]:
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                repeated.append(name)
            seen.add(name)
        return dict(pairs)

    with suppress(ValueError, RecursionError):  # what only Triton's tolerant reader takes
        json.loads(body.removeprefix(BOM_UTF8).decode("utf-8", "surrogateescape"), object_pairs_hook=note)
    return repeated


def _stands_twice(body: bytes | bytearray, spelled: bytes) -> bool:
    """Whether two keys of `body` are `spelled` so. Strings that are values may be, too."""
    num_found, start = 0, 0
    while start < len(body) and num_found < 2:
        end = start + _SEARCHED_BYTES  # a search holds the interpreter's lock
        at = body.find(spelled, start, end + len(spelled))
        if at < 0:
            start = end
            continue
        start = at + len(spelled)
        num_found += body[start : start + _MAX_SPACE].lstrip(b" \t\r\n")[:1] == b":"
        start -= 1
    return num_found > 1


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
