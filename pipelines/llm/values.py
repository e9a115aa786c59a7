"""From a request's tensors and parameters to plain values, one set for each row of its batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from pipelines.llm.fields import ADAPTERS, INPUTS, Input, Meaning
from serving.request import InferRequest, Parameter
from serving.tensors.tensor import Array, Tensor
from sluice.errors import invalid

Values = dict[str, Any]
"""What was sent of one row, by `Input.field`: a plain value for a scalar, else the list of all elements.

Of a sparse list there are those alone that are not 0: {place: element}."""

_INT32 = range(-(2**31), 2**31)
_UINT64 = range(2**64)
_FEW = 8
"""More than any input has neutral values."""
_NO_SAMPLING = ("text_input", "messages", "input_ids", "input_lengths", "stream", "sampling_config", "cache_salt")
_CONFIG = "sampling_config"


def read_rows(
    request: InferRequest, declared: Mapping[str, Input], num_rows: int, known_inputs: Mapping[str, Input] = INPUTS
) -> list[Values]:
    """The values of each row. Parameters and scalars in tensors of one element are every row's.

    `known_inputs` are those that may come as parameters and in `sampling_config`; parameters of other names are left
    alone. Raises SluiceError INVALID for what asks for something that is not here, for what has the wrong type or size,
    and for values that contradict each other.
    """
    rows: list[Values] = [{} for _ in range(num_rows)]
    for name, tensor in request.inputs.items():
        known = declared[name]
        for values, elements in zip(rows, _split(tensor, num_rows), strict=True):
            _put(values, known, _of_elements(known, elements))
    for name, parameter in request.parameters.items():
        found = known_inputs.get(name)
        if found is not None:
            value = _of_parameter(found, parameter, f"parameter '{name}'")
            for values in rows:
                _put(values, found, value)
    for values in rows:
        _add_config(values, known_inputs)
    return rows


def wants_stream(request: InferRequest) -> bool | None:
    """What the request, which need not be checked yet, says about streaming; None where it says nothing."""
    for name in ("stream", "streaming"):
        if name in request.inputs:
            return _flag(request.inputs[name])
        if name in request.parameters:
            return bool(request.parameters[name])
    return None


def _flag(tensor: Tensor) -> bool | None:
    try:
        return bool(tensor.array.flat[0])
    except (IndexError, KeyError, ValueError):  # empty, or not a tensor at all, which the check will say
        return None


def _split(tensor: Tensor, num_rows: int) -> Iterable[Array]:
    """The elements of each row, flat."""
    array = tensor.array
    if num_rows == 1:
        return (array.ravel(),)
    if array.ndim and array.shape[0] == num_rows:
        return array.reshape(num_rows, -1)
    if array.size == 1:
        return [array.ravel()] * num_rows
    raise invalid(
        tensor.name, f"input '{tensor.name}' has shape {list(tensor.shape)}, but the request has {num_rows} rows"
    )


def _of_elements(known: Input, elements: Array) -> Any:
    if known.meaning is not Meaning.OBEYED and elements.dtype != np.object_:
        # Logits and embeddings may have millions: all that matters is whether any value is not neutral.
        elements = np.unique(elements)[:_FEW]
    if known.is_sparse:  # a vocabulary's length: what is 0 is not looked at one by one
        places = np.flatnonzero(elements)
        return dict(zip(places.tolist(), elements[places].tolist(), strict=True))
    name = f"input '{known.name}'"
    plain = [_plain(element, name) for element in elements.tolist()]
    if elements.dtype == np.float32:
        # The decimal number that was meant: 0.7, not 0.699999988079071.
        plain = [float(str(element)) for element in elements]
    if known.is_list or known.meaning is not Meaning.OBEYED:
        return plain
    if len(plain) != 1:
        raise invalid(known.name, f"{name} must have 1 element for each row, got {len(plain)}")
    return plain[0]


def _plain(element: Any, name: str) -> Any:
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise invalid(name, f"{name} must be text in UTF-8") from None


def _of_parameter(known: Input, value: Parameter | list[Any], what: str) -> Any:
    """A value of JSON or of a request parameter."""
    elements = value if isinstance(value, list) else [value]
    if known.meaning is not Meaning.OBEYED:
        return elements
    is_of_type, wanted = _TYPES[known.datatype]
    if not all(map(is_of_type, elements)):
        raise invalid(known.name, f"{what} must be {wanted}, got {_shown(value)}")
    if known.is_sparse:
        return {place: float(element) for place, element in enumerate(elements) if element}
    if known.is_list:
        return elements
    if len(elements) != 1:
        raise invalid(known.name, f"{what} must be one value, got {_shown(value)}")
    return elements[0]


def _shown(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()[:60]


def _put(values: Values, known: Input, value: Any) -> None:
    """Keep it, or find that it is no request for anything."""
    if known.meaning is Meaning.ABSENT:
        _refuse_unless_neutral(known, value)
    elif known.meaning is Meaning.OBEYED and value not in known.neutral:
        if known.field == _CONFIG:  # a pipeline's step and the client may each give one
            values.setdefault(_CONFIG, []).append(value)
            return
        before = values.setdefault(known.field, value)
        if before is not value and before != value:
            raise invalid(known.name, f"input '{known.field}' is given twice, with different values")


def _refuse_unless_neutral(known: Input, elements: list[Any]) -> None:
    for element in elements:
        if any(_is_same(element, neutral) for neutral in known.neutral):
            continue
        if known.name == "beam_width" and type(element) is int:
            message = f"input 'beam_width' must be 1, the most that this model decodes with, got {element}"
            raise invalid(known.name, message)
        raise invalid(known.name, f"input '{known.name}' is not supported{_why(known)}{_remedy(known.neutral)}")


def _why(known: Input) -> str:
    if known.needs == ADAPTERS:
        return ", as this model was started without LoRA adapters"
    return " by this model's runtime, TensorRT-LLM has it" if known.needs else ""


def _is_same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _remedy(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(orjson.dumps(value).decode() for value in neutral)
    return f"; leave it out or send {values}" if values else "; leave it out"


def _add_config(values: Values, known_inputs: Mapping[str, Input]) -> None:
    """Take what `sampling_config` holds apart. Its lists of one element are TensorRT-LLM's way to write a value."""
    for text in values.pop(_CONFIG, ()):
        for name, value in _members(text).items():
            known = known_inputs.get(name)
            if known is None or known.field in _NO_SAMPLING:
                raise invalid(_CONFIG, f"sampling_config has '{name[:40]}', which is no sampling parameter")
            if value is not None:
                _put(values, known, _of_parameter(known, value, f"'{name}' in sampling_config"))


def _members(text: str) -> dict[str, Any]:
    try:
        members = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(_CONFIG, f"sampling_config is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise invalid(_CONFIG, f"sampling_config must be a JSON object, got {_shown(members)}")
    return members


def _is_integer(value: Any) -> bool:
    return type(value) is int  # a bool is none


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "BYTES": (lambda value: isinstance(value, str), "a string"),
    "BOOL": (lambda value: isinstance(value, bool), "true or false"),
    "INT32": (lambda value: _is_integer(value) and value in _INT32, "a 32-bit integer"),
    "UINT64": (lambda value: _is_integer(value) and value in _UINT64, "an integer of 64 bits without sign"),
    "FP32": (lambda value: _is_integer(value) or isinstance(value, float), "a number"),
}
