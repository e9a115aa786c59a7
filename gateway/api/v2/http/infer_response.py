"""From an InferResponse to the body of an infer answer, each output in the form that the client requested."""

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.v2.http.json_document import array_member, boolean, find, has, string, string_member, unsigned
from sluice.gateway.api.v2.http.tensor_json import encode_pieces
from sluice.gateway.api.v2.infer import AS_JSON, OutputForm, OutputPlan, RequestedOutput, classified
from sluice.gateway.api.v2.shared_memory import SharedMemoryRegistry, write_output
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Buffer, Tensor

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
_ENCODINGS = ("identity", "deflate", "gzip")
_GZIP_WINDOW, _ZLIB_WINDOW = 15 | 16, 15
_LEVEL = 1
"""zlib's fastest level: an answer is read once, by a client that waits for it."""
_JOINED_BYTES = 256 << 10
INLINE_BYTES = 64 << 10
"""Length below which an answer is compressed on the event loop; longer ones go to a thread."""


def parse_outputs(
    document: object, plan: OutputPlan, shared_memory: SharedMemoryRegistry, log_prefix: str
) -> tuple[str, ...]:
    """Put the requested outputs into `plan` and return their names. Raises SluiceError, also for a repeated name."""
    if not has(document, "outputs"):
        return ()
    for output in array_member(document, "outputs", "Unable to parse 'outputs': "):
        parameters = find(output, "parameters")
        _check_combination(parameters)
        name = string_member(output, "name", "Unable to parse 'name': ")
        requested = _parse_output(parameters, shared_memory)
        if name in plan.named:
            raise invalid(name, f"{log_prefix}output '{name}' already exists in request")
        plan.named[name] = requested
    return tuple(plan.named)


def _check_combination(parameters: object) -> None:
    if not has(parameters, _REGION):
        return
    if has(parameters, "classification"):
        raise _conflict("classification")
    if has(parameters, "binary_data") and boolean(find(parameters, "binary_data"), "Unable to set 'binary_data': "):
        raise _conflict("binary_data")


def _conflict(other: str) -> SluiceError:
    return invalid("outputs", f"Output can't set both '{_REGION}' and '{other}'")


def _parse_output(parameters: object, shared_memory: SharedMemoryRegistry) -> RequestedOutput:
    if not isinstance(parameters, dict) or not parameters:
        return AS_JSON
    num_classes = 0
    if "classification" in parameters:
        num_classes = unsigned(parameters["classification"], "Unable to set 'classification': ")
    window = find_window(parameters, shared_memory)
    if window is not None:
        return RequestedOutput(OutputForm.SHARED_MEMORY, window=window)
    is_binary = "binary_data" in parameters and boolean(parameters["binary_data"], "Unable to parse 'binary_data': ")
    return RequestedOutput(OutputForm.BINARY if is_binary else OutputForm.JSON, num_classes)


def find_window(parameters: object, shared_memory: SharedMemoryRegistry) -> memoryview | None:
    """Return the shared memory that `parameters` name; None where they name none. Raises SluiceError."""
    if not isinstance(parameters, dict):
        return None
    name = string(parameters[_REGION], f"Unable to parse '{_REGION}': ") if _REGION in parameters else None
    offset, size = (unsigned(parameters.get(each, 0), f"Unable to parse '{each}': ") for each in (_OFFSET, _SIZE))
    return shared_memory.window(name, offset, size) if name is not None else None


class InferBody(NamedTuple):
    """A body, in pieces, whose first `json_length` bytes are JSON; None: all of it."""

    pieces: list[Buffer]
    json_length: int | None


@dataclass(slots=True)
class _Pieces:
    """The parts of an answer: JSON objects of outputs in pieces, and data behind the JSON."""

    outputs: list[bytes] = field(default_factory=list)
    binary: list[Buffer] = field(default_factory=list)
    has_binary: bool = False


def encode_infer_response(model: Model, response: InferResponse, plan: OutputPlan) -> InferBody:
    """Encode the answer in the form that the client requested; outputs for shared memory are written there.

    Raises SluiceError where an output cannot have its requested form.
    """
    pieces = _Pieces()
    for tensor in response.outputs:
        _add_output(pieces, tensor, plan.find(tensor.name), model)
    text = join_short([b'{%s,"outputs":[' % _head(model, response), *pieces.outputs, b"]}"])
    if not pieces.has_binary:
        return InferBody(text, None)
    return InferBody(join_short([*text, *pieces.binary]), sum(map(len, text)))


def join_short(pieces: list[Buffer]) -> list[Buffer]:
    """Return the pieces of a body as one where it is short, as most are: each one costs a turn of the event loop."""
    return [b"".join(pieces)] if sum(map(len, pieces)) < _JOINED_BYTES else pieces


def _head(model: Model, response: InferResponse) -> bytes:
    """Return Triton's members before the outputs, in its order."""
    head = b'"model_name":%s,"model_version":"%d"' % (orjson.dumps(model.name), model.version)
    if response.id:
        head = b'"id":%s,%s' % (orjson.dumps(response.id), head)
    if response.parameters:
        head += b',"parameters":' + orjson.dumps(response.parameters)
    return head


def _add_output(pieces: _Pieces, tensor: Tensor, requested: RequestedOutput, model: Model) -> None:
    tensor = classified(model, tensor, requested)
    name, shape = orjson.dumps(tensor.name), ",".join(map(str, tensor.shape)).encode()
    comma = b"," if pieces.outputs else b""
    text = b'%s{"name":%s,"datatype":"%s","shape":[%s]' % (comma, name, tensor.datatype.encode(), shape)
    match requested.form:
        case OutputForm.JSON:
            pieces.outputs += [text + b',"data":', *encode_pieces(tensor), b"}"]
        case OutputForm.BINARY:
            size_bytes = tensor.size_bytes
            pieces.outputs.append(b'%s,"parameters":{"binary_data_size":%d}}' % (text, size_bytes))
            pieces.binary.append(memoryview(tensor.raw).cast("B"))
            pieces.has_binary |= size_bytes > 0
        case OutputForm.SHARED_MEMORY:
            assert requested.window is not None
            write_output(requested.window, tensor)
            pieces.outputs.append(text + b"}")


def compress_body(body: list[Buffer], accept: str) -> tuple[list[Buffer], tuple[tuple[bytes, bytes], ...]]:
    """Compress the pieces of a body by the Accept-Encoding header `accept`, as Triton does.

    Returns also the headers to send.
    """
    encoding = choose_encoding(accept) if accept else "identity"
    if encoding == "identity":
        return body, ()
    compressed = _compress(body, _GZIP_WINDOW if encoding == "gzip" else _ZLIB_WINDOW)
    return [compressed], ((b"content-encoding", encoding.encode()),)


def _compress(body: list[Buffer], window: int) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, window)
    return b"".join([*map(stream.compress, body), stream.flush()])


def choose_encoding(accept: str) -> str:
    """Return the known encoding with the highest weight; of equal weights the first."""
    best, highest = "identity", 0.0
    for each in accept.split(","):
        name, _, weight_text = each.strip().partition(";q=")
        try:
            weight = float(weight_text or 1)
        except ValueError:
            continue
        if name in _ENCODINGS and weight > highest:
            best, highest = name, weight
    return best
