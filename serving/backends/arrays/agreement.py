"""Whether a configuration and the model that it is for agree. In Triton's words."""

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.batch_tensors import batch_tensors_of
from serving.backends.arrays.signature import Signature, TensorSignature
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import DataType
from sluice.errors import ErrorCode, SluiceError


def check_agreement(config: ModelConfig, spec: ModelSpec, signature: Signature) -> None:
    """Raises SluiceError INVALID that names the tensor, what was expected and what there is."""
    batch_tensors = batch_tensors_of(config)
    describing = batch_tensors.input_types
    expected = sum(not each.is_optional for each in spec.inputs.values())
    expected += len(spec.control_inputs) + len(spec.states) + len(describing)
    if len(signature.inputs) != expected:
        raise _invalid(
            f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides "
            f"{len(signature.inputs)}"
        )
    _check_inputs(spec, signature)
    for name, data_type in describing.items():
        _check_type(spec, "input", name, data_type, _allowed("input", name, signature.inputs))
    for tensor in spec.outputs.values():
        model = _allowed("output", tensor.name, signature.outputs)
        _check_type(spec, "output", tensor.name, tensor.data_type, model)
        if tensor.name not in batch_tensors.scattered:
            _check_dims(spec, _dims_of(tensor), model, is_exact=True)
    _check_states(spec, signature)


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)


def _check_inputs(spec: ModelSpec, signature: Signature) -> None:
    for tensor in spec.inputs.values():
        if tensor.is_optional and spec.max_batch_size:
            raise _invalid(
                f"unable to load model '{spec.name}', optional input '{tensor.name}' is not supported for models that "
                "support batching"
            )
        model = _allowed("input", tensor.name, signature.inputs | signature.optional_inputs)
        _check_type(spec, "input", tensor.name, tensor.data_type, model)
        if tensor.allows_ragged:
            _check_ragged(spec, tensor, model)
        else:
            _check_dims(spec, _dims_of(tensor), model, is_exact=False)


def _check_states(spec: ModelSpec, signature: Signature) -> None:
    """Both sides of a state, which a request's answer hands to the next request."""
    for state in spec.states:
        for side, name, tensors in (
            ("input", state.input_name, signature.inputs),
            ("output", state.output_name, signature.outputs),
        ):
            model = _allowed(side, name, tensors)
            _check_type(spec, side, name, state.data_type, model)
            _check_dims(spec, state.dims, model, is_exact=False)


def _allowed(side: str, name: str, allowed: dict[str, TensorSignature]) -> TensorSignature:
    if name not in allowed:
        raise _invalid(f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(sorted(allowed))}")
    return allowed[name]


def _check_ragged(spec: ModelSpec, tensor: TensorSpec, model: TensorSignature) -> None:
    """Ragged rows are put one behind the other, in one dimension."""
    start = (
        f"unable to load model '{spec.name}', configuration expects model provides input with shape [-1] for ragged "
        f"input '{tensor.name}'"
    )
    if tensor.is_optional:
        raise _invalid(f"{start}, which is not supported for optional input")
    if model.dims != (-1,):
        raise _invalid(f"{start}, model provides {_text(model.dims)}")


def _check_type(spec: ModelSpec, side: str, name: str, data_type: DataType, model: TensorSignature) -> None:
    if data_type is not model.data_type:
        raise _invalid(
            f"unable to load model '{spec.name}', configuration expects datatype {data_type.config_name} for "
            f"{side} '{name}', model provides {model.data_type.config_name}"
        )


def _dims_of(tensor: TensorSpec) -> tuple[int, ...]:
    """As the backend sees them."""
    return tensor.dims if tensor.reshape is None else tensor.reshape


def _check_dims(spec: ModelSpec, dims: Sequence[int], model: TensorSignature, *, is_exact: bool) -> None:
    if not model.dims:
        _check_scalar(spec, model.name, dims)
    elif spec.max_batch_size > 0:
        _check_batched(spec, model, dims, is_exact)
    elif not _fits(model.dims, dims, is_exact):
        raise _invalid(
            f"model '{spec.name}', tensor '{model.name}': the model expects {len(model.dims)} dimensions (shape "
            f"{_text(model.dims)}) but the model configuration specifies {len(dims)} dimensions (shape {_text(dims)})"
        )


def _check_scalar(spec: ModelSpec, name: str, dims: Sequence[int]) -> None:
    if any(size != 1 for size in dims):
        raise _invalid(
            f"unable to load model '{spec.name}', scalar tensor '{name}', should only provide 1 in the model "
            f"configuration when the model doesn't support batching. Model configuration provided: {_text(dims)}."
        )


def _check_batched(spec: ModelSpec, model: TensorSignature, dims: Sequence[int], is_exact: bool) -> None:
    start = f"model '{spec.name}', tensor '{model.name}'"
    if model.dims[0] != -1:
        raise _invalid(
            f"{start}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {_text(model.dims)}"
        )
    full = (-1, *dims)
    if not _fits(model.dims, full, is_exact):
        raise _invalid(
            f"{start}: the model expects {len(model.dims)} dimensions (shape {_text(model.dims)}) but the model "
            f"configuration specifies {len(full)} dimensions (an initial batch dimension because max_batch_size > 0 "
            f"followed by the explicit tensor shape, making complete shape {_text(full)})"
        )


def _fits(model: Sequence[int], dims: Sequence[int], is_exact: bool) -> bool:
    """What the model leaves open the configuration may fix for an input, and not for an output."""
    return len(model) == len(dims) and all(
        has == says or (has == -1 and not is_exact) for has, says in zip(model, dims, strict=True)
    )


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
