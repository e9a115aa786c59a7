"""The check whether a request fits its model. Errors are in Triton's words.

Checks run in Triton's order, and over the inputs from the last to the first, so that of several faults a client is
told the same one. Requests that Triton accepts and cannot serve (no rows, negative sizes) are rejected here.
"""

from collections.abc import Iterable
from math import prod
from struct import unpack_from

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import BYTES, DATA_TYPES
from sluice.serving.tensors.tensor import Tensor, format_shape

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
_MAX_CORRELATION_ID_BYTES = 128
_LENGTH_BYTES = 4
"""Size of the length that stands before each element of a BYTES tensor."""


def check_request(request: InferRequest, spec: ModelSpec) -> None:
    """Check a request, set its batch size, reshape its inputs. Raises INVALID, UNIMPLEMENTED for a long sequence id."""
    correlation_id = request.correlation_id
    if isinstance(correlation_id, str) and len(correlation_id.encode()) > _MAX_CORRELATION_ID_BYTES:
        message = f"string correlation ID cannot be longer than {_MAX_CORRELATION_ID_BYTES} characters"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    for name in request.requested_outputs:
        if name not in spec.outputs:
            raise _invalid(name, f"unexpected inference output '{name}' for model '{spec.name}'")
    inputs, specs = request.inputs, spec.inputs
    if len(inputs) != len(specs):
        _check_count(request, spec)
    is_batched = spec.max_batch_size > 0
    if is_batched:
        request.batch_size = _batch_size(request, spec)
    for name, tensor in reversed(inputs.items()):
        declared = specs.get(name)
        if declared is None:
            raise _unexpected_input(name, spec)
        if tensor.datatype != declared.data_type.name:
            raise _wrong_type(tensor, declared, request, spec)
        dims = tensor.shape[1:] if is_batched else tensor.shape
        if (dims != declared.dims or -1 in dims) and not _fits(dims, declared.dims):
            raise _wrong_shape(tensor, declared, request, spec)
        if is_batched and tensor.shape[0] == 0:
            raise _no_rows(tensor, request, spec)
        try:
            tensor.check_size()
        except ValueError:
            raise _wrong_size(tensor, request, spec) from None
        if declared.reshape is not None:
            leading = tensor.shape[: len(tensor.shape) - len(dims)]
            inputs[name] = tensor.reshaped(leading + reshaped_dims(dims, declared.dims, declared.reshape))


def prepare_strings(request: InferRequest, spec: ModelSpec) -> None:
    """Do ahead, on a thread, what takes long with BYTES inputs of many elements: both their forms, and their check.

    Raises INVALID where their bytes do not fit their shape, and for more elements than a tensor may have.
    """
    for name, tensor in request.inputs.items():
        if tensor.datatype != BYTES.name:
            continue
        if tensor.num_elements > byte_strings.MAX_ELEMENTS < len(tensor.raw) // _LENGTH_BYTES:
            raise _invalid(
                name,
                f"{request.log_prefix}input '{name}' for model '{spec.name}' has {tensor.num_elements} string "
                f"elements; at most {byte_strings.MAX_ELEMENTS} are taken",
            )
        try:
            _ = tensor.array, tensor.raw  # each form is kept once it is made
        except ValueError:
            raise _wrong_size(tensor, request, spec) from None


def reshaped_dims(dims: tuple[int, ...], declared: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return `target` with its variable sizes taken in order from `dims`, where `declared` has variable ones."""
    variable = iter([size for size, expected in zip(dims, declared, strict=True) if expected == -1])
    return tuple(next(variable) if size == -1 else size for size in target)


def _check_count(request: InferRequest, spec: ModelSpec) -> None:
    required = [name for name, each in spec.inputs.items() if not each.is_optional]
    most, got = len(spec.inputs), len(request.inputs)
    if len(required) <= got <= most:
        return
    expected = f"{most} inputs" if len(required) == most else f"number of inputs between {len(required)} and {most}"
    missing = [name for name in required if name not in request.inputs]
    raise _invalid(
        None,
        f"{request.log_prefix}expected {expected} but got {got} inputs for model '{spec.name}'. "
        f"Got input(s) {_names(reversed(request.inputs))}, but missing required input(s) {_names(missing)}. "
        "Please provide all required input(s).",
    )


def _batch_size(request: InferRequest, spec: ModelSpec) -> int:
    """Return the first dimension that all inputs share, ignoring empty ones; 1 without inputs."""
    found = 0
    for name, tensor in reversed(request.inputs.items()):
        shape = tensor.shape
        if name not in spec.inputs:
            raise _unexpected_input(name, spec)
        if not shape:
            raise _invalid(
                name,
                f"{request.log_prefix}input '{name}' has no shape but model requires batch dimension for '{spec.name}'",
            )
        if found == 0:
            found = shape[0]
        elif shape[0] != found or found < 0:
            raise _invalid(
                name, f"{request.log_prefix}input '{name}' batch size does not match other inputs for '{spec.name}'"
            )
    if not 0 <= found <= spec.max_batch_size:
        bound = f"<= {spec.max_batch_size}"
        raise _invalid(None, f"{request.log_prefix}inference request batch-size must be {bound} for '{spec.name}'")
    return found or 1


def _fits(dims: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    if len(dims) != len(declared):
        return False
    return all(size >= 0 and expected in (size, -1) for size, expected in zip(dims, declared, strict=True))


def _unexpected_input(name: str, spec: ModelSpec) -> SluiceError:
    return _invalid(name, f"unexpected inference input '{name}' for model '{spec.name}'")


def _wrong_type(tensor: Tensor, declared: TensorSpec, request: InferRequest, spec: ModelSpec) -> SluiceError:
    datatype = tensor.datatype if tensor.datatype in DATA_TYPES else "<invalid>"
    return _invalid(
        declared.name,
        f"{request.log_prefix}inference input '{declared.name}' data-type is '{datatype}', "
        f"but model '{spec.name}' expects '{declared.data_type.name}'",
    )


def _wrong_shape(tensor: Tensor, declared: TensorSpec, request: InferRequest, spec: ModelSpec) -> SluiceError:
    is_batched = spec.max_batch_size > 0
    dims = tensor.shape[1:] if is_batched else tensor.shape
    if len(dims) == len(declared.dims) and any(size < 0 for size in dims):
        return _invalid(
            declared.name,
            f"{request.log_prefix}All input dimensions should be specified for input '{declared.name}' "
            f"for model '{spec.name}', got {format_shape(tensor.shape)}",
        )
    expected = (-1, *declared.dims) if is_batched else declared.dims
    return _invalid(
        declared.name,
        f"{request.log_prefix}unexpected shape for input '{declared.name}' for model '{spec.name}'. "
        f"Expected {format_shape(expected)}, got {format_shape(tensor.shape)}. {_BATCH_NOTE if is_batched else ''}",
    )


def _no_rows(tensor: Tensor, request: InferRequest, spec: ModelSpec) -> SluiceError:
    """Return the error for an input without rows. Triton tells of missing bytes, and accepts them if present."""
    expected = Tensor(tensor.name, tensor.datatype, (request.batch_size, *tensor.shape[1:]), tensor.raw)
    try:
        expected.check_size()
    except ValueError:
        return _wrong_size(expected, request, spec)
    return _invalid(None, f"{request.log_prefix}inference request batch-size must be >= 1 for '{spec.name}'")


def _wrong_size(tensor: Tensor, request: InferRequest, spec: ModelSpec) -> SluiceError:
    """Return the error for wire bytes that do not fit the shape."""
    name, raw = tensor.name, memoryview(tensor.raw).cast("B")
    if tensor.data_type is BYTES:
        return _invalid(name, _string_fault(raw, prod(tensor.shape), name, request.log_prefix, spec.name))
    expected = tensor.data_type.itemsize * prod(tensor.shape)
    return _invalid(
        name,
        f"{request.log_prefix}input byte size mismatch for input '{name}' for model '{spec.name}'. "
        f"Expected {expected}, got {len(raw)}",
    )


def _string_fault(raw: memoryview, expected: int, name: str, prefix: str, model: str) -> str:
    """Return the first fault of length-prefixed elements that are known to have one; a truncated element comes last."""
    found, start = 0, 0
    cut = ""
    while start < len(raw):
        left = len(raw) - start
        if left < _LENGTH_BYTES:
            return (
                f"{prefix}incomplete string length indicator for inference input '{name}' for model '{model}', "
                f"expecting {_LENGTH_BYTES} bytes but only {left} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        found += 1
        if found > expected:
            return (
                f"{prefix}unexpected number of string elements {found} for inference input '{name}' "
                f"for model '{model}', expecting {expected}"
            )
        (length,) = unpack_from("<I", raw, start)
        start += _LENGTH_BYTES
        left -= _LENGTH_BYTES
        if length > left:
            cut = (
                f"incomplete string data for inference input '{name}', "
                f"expecting string of length {length} but only {left} bytes available"
            )
        start += length
    if found == expected:
        return cut
    return f"{prefix}expected {expected} string elements for inference input '{name}' for model '{model}', got {found}"


def _names(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _invalid(name: str | None, message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message, param=name)
