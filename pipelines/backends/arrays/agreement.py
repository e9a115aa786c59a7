"""Whether a configuration and the model that it is for agree. In Triton's words."""

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.arrays.signature import Signature, TensorSignature
from pipelines.inference.spec import ModelSpec, TensorSpec


def check_agreement(config: ModelConfig, spec: ModelSpec, signature: Signature) -> None:
    """Raises SluiceError INVALID that names the tensor, what was expected and what there is."""
    if config.batch_input or config.batch_output:
        raise _invalid(f"unable to load model '{spec.name}', batch_input and batch_output are not supported")
    expected = sum(not each.is_optional for each in spec.inputs.values()) + len(spec.control_inputs)
    if len(signature.inputs) != expected:
        raise _invalid(
            f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides "
            f"{len(signature.inputs)}"
        )
    allowed = signature.inputs | signature.optional_inputs
    for tensor in spec.inputs.values():
        _check_kind_of_input(spec, tensor)
        if tensor.name not in allowed:
            raise _unexpected("input", tensor.name, allowed)
        _check(spec, "input", tensor, allowed[tensor.name], is_exact=False)
    for tensor in spec.outputs.values():
        if tensor.name not in signature.outputs:
            raise _unexpected("output", tensor.name, signature.outputs)
        _check(spec, "output", tensor, signature.outputs[tensor.name], is_exact=True)


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)


def _check_kind_of_input(spec: ModelSpec, tensor: TensorSpec) -> None:
    if tensor.is_optional and spec.max_batch_size:
        raise _invalid(
            f"unable to load model '{spec.name}', optional input '{tensor.name}' is not supported for models that "
            "support batching"
        )
    if tensor.allows_ragged:
        raise _invalid(f"unable to load model '{spec.name}', ragged input '{tensor.name}' is not supported")


def _unexpected(side: str, name: str, allowed: dict[str, TensorSignature]) -> SluiceError:
    return _invalid(f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(sorted(allowed))}")


def _check(spec: ModelSpec, side: str, tensor: TensorSpec, model: TensorSignature, *, is_exact: bool) -> None:
    if tensor.data_type is not model.data_type:
        raise _invalid(
            f"unable to load model '{spec.name}', configuration expects datatype {tensor.data_type.config_name} for "
            f"{side} '{tensor.name}', model provides {model.data_type.config_name}"
        )
    dims = tensor.dims if tensor.reshape is None else tensor.reshape
    if not model.dims:
        _check_scalar(spec, tensor.name, dims)
    elif spec.max_batch_size > 0:
        _check_batched(spec, model, dims, is_exact)
    elif not _fits(model.dims, dims, is_exact):
        raise _invalid(
            f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(model.dims)} dimensions (shape "
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
