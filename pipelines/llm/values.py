"""Reads a request's tensors and parameters as plain values, one set for each row of its batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from sluice.errors import invalid
from sluice.pipelines.llm.fields import ADAPTERS, IMAGES, INPUTS, PROMPTS, InputSupport, LlmInput
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.request import InferRequest, Parameter
from sluice.serving.spec import ModelSpec
from sluice.serving.tensors.tensor import Array, Tensor

Values = dict[str, Any]
"""The values sent for one row, by `LlmInput.field`: a plain value for a scalar, else the list of all elements.

A sparse list has only the elements that are not 0, by index."""

_INT32 = range(-(2**31), 2**31)
_UINT64 = range(2**64)
_MAX_PROMPT_TOKENS = 1 << 20
_MAX_ELEMENTS = 1 << 14
"""Most elements of a list. Longer ones hold up the event loop."""
SEQUENCES, BATCH_INDEX = "num_return_sequences", "batch_index"
_NO_SAMPLING_FIELDS = (
    SEQUENCES,
    "text_input",
    "messages",
    "input_ids",
    "input_lengths",
    "stream",
    "sampling_config",
    "cache_salt",
)
_CONFIG = "sampling_config"
_MAX_CONFIG_CHARS = 1 << 20


def read_rows(
    request: InferRequest,
    declared: Mapping[str, LlmInput],
    num_rows: int,
    known_inputs: Mapping[str, LlmInput] = INPUTS,
) -> list[Values]:
    """Read the values of each row. Parameters and tensors of one element apply to every row. `known_inputs` may come as
    parameters and in `sampling_config`; parameters of other names are ignored. Raises INVALID for values that ask for
    an unsupported feature, have the wrong type or size, or contradict each other."""
    rows: list[Values] = [{} for _ in range(num_rows)]
    for name, tensor in request.inputs.items():
        known = declared[name]
        for values, elements in zip(rows, _split(tensor, num_rows), strict=True):
            _put(values, known, _read_elements(known, elements))
    for name, parameter in request.parameters.items():
        found = known_inputs.get(name)
        if found is not None:
            value = _read_parameter(found, parameter, f"parameter '{name}'")
            for values in rows:
                _put(values, found, value)
    for values in rows:
        _unpack_config(values, known_inputs)
    return rows


def refuse_long_prompts(request: InferRequest, tokenizer: Tokenizer, max_tokens: int) -> None:
    """Raise INVALID for texts that are refused by their length alone: it takes long to read them."""
    for name in PROMPTS:
        tensor, parameter = request.inputs.get(name), request.parameters.get(name)
        if isinstance(parameter, str):
            tokenizer.refuse_long(parameter, name, max_tokens)
        if tensor is not None and tensor.datatype == "BYTES":
            for element in tensor.strings():
                tokenizer.refuse_long(element, name, max_tokens)


def wants_stream(request: InferRequest) -> bool | None:
    """Return the request's `stream` or `streaming`, None where it has neither. The request may be unchecked."""
    for name in ("stream", "streaming"):
        if name in request.inputs:
            return _read_flag(request.inputs[name])
        if name in request.parameters:
            return bool(request.parameters[name])
    return None


def is_streamed(request: InferRequest, spec: ModelSpec) -> bool:
    """Whether a model with this specification answers the request with a stream of responses."""
    if not spec.is_decoupled:
        return False
    streams = wants_stream(request)
    return request.streams_by_default if streams is None else streams


def streams_one_row(request: InferRequest, spec: ModelSpec, num_rows: int) -> bool:
    """Whether a model answers the request with a stream, of whose rows its responses do not tell. Raises INVALID for a
    model that does not stream, and for a stream of several rows."""
    if wants_stream(request) and not spec.is_decoupled:
        raise invalid("stream", f"model '{spec.name}' does not stream: its transaction policy is not decoupled")
    streams = is_streamed(request, spec)
    if streams and num_rows != 1:
        raise invalid("stream", f"only a request of one row can stream, this one has {num_rows}")
    return streams


def gives_several(request: InferRequest, spec: ModelSpec) -> bool:
    """Whether a model with this specification gives each sequence responses of its own: a row has several, or there are
    several rows, the caller takes a stream and the model declares an output that tells them apart. The request may be
    unchecked."""
    if not spec.is_decoupled:
        return False
    # The inputs count too: the batch size may not have been set yet.
    has_rows = request.batch_size > 1 or any(tensor.shape[:1] > (1,) for tensor in request.inputs.values())
    if request.takes_stream and spec.max_batch_size > 0 and BATCH_INDEX in spec.outputs and has_rows:
        return True
    return find_most_sequences(request) > 1


def find_most_sequences(request: InferRequest) -> int:
    """Return the largest `num_return_sequences` of the request's rows. The request may be unchecked."""
    sent = request.inputs.get(SEQUENCES)
    try:
        return int(sent.array.max() if sent is not None else request.parameters.get(SEQUENCES, 1))
    except (KeyError, ValueError, TypeError):  # the check reports it
        return 1


def _read_flag(tensor: Tensor) -> bool | None:
    try:
        return bool(tensor.array.flat[0])
    except (IndexError, KeyError, ValueError):  # empty, or not a tensor at all: the check reports it
        return None


def _split(tensor: Tensor, num_rows: int) -> Iterable[Array]:
    """Return the elements of each row, flat."""
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


def _read_elements(known: LlmInput, elements: Array) -> Any:
    if known.support is not InputSupport.SUPPORTED and elements.dtype != np.object_:
        # Logits and embeddings may have millions; only whether any value is not neutral matters.
        others = elements
        for neutral in known.neutral:
            others = others[others != neutral]
        elements = others[:1] if others.size else elements[:1]
    if known.is_sparse:  # as long as the vocabulary: zeros are skipped at once
        places = np.flatnonzero(elements)
        return dict(zip(places.tolist(), elements[places].tolist(), strict=True))
    name = f"input '{known.name}'"
    most = _MAX_PROMPT_TOKENS if known.name == "input_ids" else _MAX_ELEMENTS
    if elements.size > most:
        raise invalid(known.name, f"{name} must have at most {most} elements, got {elements.size}")
    plain = elements.tolist()
    if elements.dtype == np.object_:
        plain = [_plain(element, name) for element in plain]
    if elements.dtype == np.float32:
        # The decimal number that the client wrote: 0.7, not 0.699999988079071.
        plain = [float(str(element)) for element in elements]
    if known.is_list or known.support is not InputSupport.SUPPORTED:
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


def _read_parameter(known: LlmInput, value: Parameter | list[Any], what: str) -> Any:
    """Return a value from JSON or from a request parameter. Errors call it `what`."""
    elements = value if isinstance(value, list) else [value]
    if known.support is not InputSupport.SUPPORTED:
        return elements
    is_of_type, expected = _TYPES[known.datatype]
    if not all(map(is_of_type, elements)):
        raise invalid(known.name, f"{what} must be {expected}, got {_shown(value)}")
    if known.is_sparse:
        return {place: float(element) for place, element in enumerate(elements) if element}
    if known.is_list:
        return elements
    if len(elements) != 1:
        raise invalid(known.name, f"{what} must be one value, got {_shown(value)}")
    return elements[0]


def _shown(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()[:60]


def _put(values: Values, known: LlmInput, value: Any) -> None:
    """Keep the value, or drop a neutral or ignored one. Raises INVALID for an unsupported one."""
    if known.support is InputSupport.UNSUPPORTED:
        _refuse_unless_neutral(known, value)
    elif known.support is InputSupport.SUPPORTED and value not in known.neutral:
        if known.field == _CONFIG:  # a step of a pipeline and the client may each send one
            values.setdefault(_CONFIG, []).append(value)
            return
        before = values.setdefault(known.field, value)
        if before is not value and before != value:
            raise invalid(known.name, f"input '{known.field}' is given twice, with different values")


def _refuse_unless_neutral(known: LlmInput, elements: list[Any]) -> None:
    for element in elements:
        if any(_is_same(element, neutral) for neutral in known.neutral):
            continue
        if known.name == "beam_width" and type(element) is int:
            message = f"input 'beam_width' must be 1, the most that this model decodes with, got {element}"
            raise invalid(known.name, message)
        raise invalid(known.name, f"input '{known.name}' is not supported{_reason(known)}{_remedy(known.neutral)}")


def _reason(known: LlmInput) -> str:
    if known.needs == ADAPTERS:
        return ", as this model was started without LoRA adapters"
    if known.needs == IMAGES:
        return ": this model takes text alone"
    return " by this model's runtime, TensorRT-LLM has it" if known.needs else ""


def _is_same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _remedy(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(orjson.dumps(value).decode() for value in neutral)
    return f"; leave it out or send {values}" if values else "; leave it out"


def _unpack_config(values: Values, known_inputs: Mapping[str, LlmInput]) -> None:
    """Move the members of `sampling_config` into `values`. A list of one element is TensorRT-LLM's form of a value."""
    for text in values.pop(_CONFIG, ()):
        for name, value in _members(text).items():
            known = known_inputs.get(name)
            if known is None or known.field in _NO_SAMPLING_FIELDS:
                raise invalid(_CONFIG, f"sampling_config has '{name[:40]}', which is no sampling parameter")
            if value is not None:
                _put(values, known, _read_parameter(known, value, f"'{name}' in sampling_config"))


def _members(text: str) -> dict[str, Any]:
    if len(text) > _MAX_CONFIG_CHARS:
        raise invalid(_CONFIG, f"sampling_config must have at most {_MAX_CONFIG_CHARS} characters, got {len(text)}")
    try:
        members = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid(_CONFIG, f"sampling_config is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise invalid(_CONFIG, f"sampling_config must be a JSON object, got {_shown(members)}")
    return members


def _is_integer(value: Any) -> bool:
    return type(value) is int  # which a bool is not


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "BYTES": (lambda value: isinstance(value, str), "a string"),
    "BOOL": (lambda value: isinstance(value, bool), "true or false"),
    "INT32": (lambda value: _is_integer(value) and value in _INT32, "a 32-bit integer"),
    "UINT64": (lambda value: _is_integer(value) and value in _UINT64, "an integer of 64 bits without sign"),
    "FP32": (lambda value: _is_integer(value) or isinstance(value, float), "a number"),
}
