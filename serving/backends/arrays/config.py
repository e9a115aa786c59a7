"""Completes a configuration from a model's signature, and checks it against that. The rules and errors are Triton's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.batch import parse_batch_tensors
from serving.backends.arrays.session import Signature, TensorSignature
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import DataType
from serving.tensors.tensor import format_shape
from sluice.errors import invalid_argument

DEFAULT_MAX_BATCH_SIZE = 4
"""Default of Triton's `--backend-config=default-max-batch-size`."""


def default_max_batch_size(options: Mapping[str, Mapping[str, str]], backend: str) -> int:
    """Return the option of `backend`, else the one given for all backends. Raises INVALID where it is not a number."""
    key = "default-max-batch-size"
    text = options.get(backend, {}).get(key) or options.get("", {}).get(key)
    if text is None:
        return DEFAULT_MAX_BATCH_SIZE
    try:
        return int(text)
    except ValueError:
        raise invalid_argument(f"'{text}' is no {key}") from None


def needs_completion(config: ModelConfig) -> bool:
    """Return whether the model must be opened to complete `config`: not where it has inputs and outputs."""
    return not (config.input and config.output)


def complete_config(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> None:
    """Fill in batch size, batching, inputs and outputs. Raises INVALID where the model cannot take batches."""
    _complete_batching(config, signature, default_max_batch_size)
    set_by_server = inputs_set_by_server(config)
    is_batching = config.max_batch_size > 0
    if not config.input:
        clients = (each for name, each in signature.inputs.items() if name not in set_by_server)
        _add_tensors(config.input, clients, is_batching)
    if not config.output:
        states = {each.output_name for each in config.sequence_batching.state}
        _add_tensors(
            config.output, (each for name, each in signature.outputs.items() if name not in states), is_batching
        )


def inputs_set_by_server(config: ModelConfig) -> set[str]:
    """Return the names of the inputs that no client sends: batch inputs, sequence controls and states."""
    names = {name for each in config.batch_input for name in each.target_name}
    names |= {each.name for each in config.sequence_batching.control_input}
    return names | {each.input_name for each in config.sequence_batching.state}


def _complete_batching(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> None:
    if not signature.can_batch:
        if config.max_batch_size:
            raise invalid_argument(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        return
    config.max_batch_size = config.max_batch_size or max(default_max_batch_size, 0)
    if config.max_batch_size > 1 and not config.WhichOneof("scheduling_choice"):
        config.dynamic_batching.SetInParent()


def _add_tensors(to: Any, tensors: Iterable[TensorSignature], is_batching: bool) -> None:
    for tensor in tensors:
        entry = to.add(name=tensor.name, data_type=model_config_pb2.DataType.Value(tensor.data_type.config_name))
        dims = tensor.dims[1:] if is_batching else tensor.dims
        # A configuration cannot express "no dims": it says [1], reshaped where the rows are batched.
        entry.dims.extend(dims or (1,))
        if not dims and is_batching:
            entry.reshape.SetInParent()


def check_config(config: ModelConfig, spec: ModelSpec, signature: Signature) -> None:
    """Check the configuration against the signature. Raises INVALID with what was expected and what the model has."""
    batch_tensors = parse_batch_tensors(config)
    batch_inputs = batch_tensors.input_types
    expected = sum(not each.is_optional for each in spec.inputs.values())
    expected += len(spec.control_inputs) + len(spec.states) + len(batch_inputs)
    if len(signature.inputs) != expected:
        raise invalid_argument(
            f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides "
            f"{len(signature.inputs)}"
        )
    _check_inputs(spec, signature)
    for name, data_type in batch_inputs.items():
        _check_type(spec, "input", name, data_type, _find_tensor("input", name, signature.inputs))
    for tensor in spec.outputs.values():
        model = _find_tensor("output", tensor.name, signature.outputs)
        _check_type(spec, "output", tensor.name, tensor.data_type, model)
        if tensor.name not in batch_tensors.scattered:
            _check_dims(spec, tensor.model_dims, model, is_exact=True)
    _check_states(spec, signature)


def _check_inputs(spec: ModelSpec, signature: Signature) -> None:
    for tensor in spec.inputs.values():
        if tensor.is_optional and spec.max_batch_size:
            raise invalid_argument(
                f"unable to load model '{spec.name}', optional input '{tensor.name}' is not supported for models that "
                "support batching"
            )
        model = _find_tensor("input", tensor.name, signature.inputs | signature.optional_inputs)
        _check_type(spec, "input", tensor.name, tensor.data_type, model)
        if tensor.allows_ragged:
            _check_ragged(spec, tensor, model)
        else:
            _check_dims(spec, tensor.model_dims, model, is_exact=False)


def _check_states(spec: ModelSpec, signature: Signature) -> None:
    """Check both tensors of each state: the output of one request becomes the input of the next."""
    for state in spec.states:
        for side, name, tensors in (
            ("input", state.input_name, signature.inputs),
            ("output", state.output_name, signature.outputs),
        ):
            model = _find_tensor(side, name, tensors)
            _check_type(spec, side, name, state.data_type, model)
            _check_dims(spec, state.dims, model, is_exact=False)


def _find_tensor(side: str, name: str, allowed: dict[str, TensorSignature]) -> TensorSignature:
    if name not in allowed:
        raise invalid_argument(
            f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(sorted(allowed))}"
        )
    return allowed[name]


def _check_ragged(spec: ModelSpec, tensor: TensorSpec, model: TensorSignature) -> None:
    """Check that a ragged input has one dimension: its rows are concatenated."""
    start = (
        f"unable to load model '{spec.name}', configuration expects model provides input with shape [-1] for ragged "
        f"input '{tensor.name}'"
    )
    if tensor.is_optional:
        raise invalid_argument(f"{start}, which is not supported for optional input")
    if model.dims != (-1,):
        raise invalid_argument(f"{start}, model provides {format_shape(model.dims)}")


def _check_type(spec: ModelSpec, side: str, name: str, data_type: DataType, model: TensorSignature) -> None:
    if data_type is not model.data_type:
        raise invalid_argument(
            f"unable to load model '{spec.name}', configuration expects datatype {data_type.config_name} for "
            f"{side} '{name}', model provides {model.data_type.config_name}"
        )


def _check_dims(spec: ModelSpec, dims: Sequence[int], model: TensorSignature, *, is_exact: bool) -> None:
    if not model.dims:
        _check_scalar(spec, model.name, dims)
    elif spec.max_batch_size > 0:
        _check_batched(spec, model, dims, is_exact)
    elif not _fits(model.dims, dims, is_exact):
        raise invalid_argument(
            f"model '{spec.name}', tensor '{model.name}': the model expects {len(model.dims)} dimensions (shape "
            f"{format_shape(model.dims)}) but the model configuration specifies {len(dims)} dimensions (shape "
            f"{format_shape(dims)})"
        )


def _check_scalar(spec: ModelSpec, name: str, dims: Sequence[int]) -> None:
    if any(size != 1 for size in dims):
        raise invalid_argument(
            f"unable to load model '{spec.name}', scalar tensor '{name}', should only provide 1 in the "
            f"model configuration when the model doesn't support batching. Model configuration provided: "
            f"{format_shape(dims)}."
        )


def _check_batched(spec: ModelSpec, model: TensorSignature, dims: Sequence[int], is_exact: bool) -> None:
    start = f"model '{spec.name}', tensor '{model.name}'"
    if model.dims[0] != -1:
        raise invalid_argument(
            f"{start}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {format_shape(model.dims)}"
        )
    full = (-1, *dims)
    if not _fits(model.dims, full, is_exact):
        raise invalid_argument(
            f"{start}: the model expects {len(model.dims)} dimensions (shape {format_shape(model.dims)}) but the model "
            f"configuration specifies {len(full)} dimensions (an initial batch dimension because max_batch_size > 0 "
            f"followed by the explicit tensor shape, making complete shape {format_shape(full)})"
        )


def _fits(model: Sequence[int], dims: Sequence[int], is_exact: bool) -> bool:
    """Return whether the dims match. The configuration may fix sizes that the model leaves open unless `is_exact`."""
    return len(model) == len(dims) and all(
        size == configured or (size == -1 and not is_exact) for size, configured in zip(model, dims, strict=True)
    )
