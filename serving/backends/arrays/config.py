"""Completes a configuration from a model's signature, and checks it against that. The rules and errors are Triton's."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument
from sluice.serving.backends.arrays.batch import parse_batch_tensors
from sluice.serving.backends.arrays.session import Signature, TensorSignature
from sluice.serving.findings import Finding, InvalidConfig
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import DataType
from sluice.serving.tensors.tensor import format_shape

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


def check_config(
    config: ModelConfig, spec: ModelSpec, signature: Signature, read_other: Callable[[], Signature] | None = None
) -> None:
    """Check the configuration against the signature. Raises InvalidConfig with all that contradicts the model.

    `read_other` returns a second signature, which may have other sizes: a library that optimizes a model may find that
    a size which the model leaves open is always the same. An output may have the sizes of either.
    """
    found = tuple(_Comparison(config, spec, signature).findings())
    if found and read_other is not None:
        either = _with_sizes_of(read_other(), signature, spec)
        found = tuple(_Comparison(config, spec, either).findings()) and found
    if found:
        raise InvalidConfig(found)


def _with_sizes_of(other: Signature, signature: Signature, spec: ModelSpec) -> Signature:
    """Return `signature` with its outputs' sizes of `other`, but the batch dimension's, which must be open in both."""
    num_kept = 1 if spec.max_batch_size > 0 else 0
    outputs = {
        name: replace(each, dims=(*each.dims[:num_kept], *other.outputs[name].dims[num_kept:]))
        for name, each in signature.outputs.items()
    }
    return replace(signature, outputs=outputs)


class _Comparison:
    """Compares a model's configuration with its signature."""

    def __init__(self, config: ModelConfig, spec: ModelSpec, signature: Signature) -> None:
        self._spec = spec
        self._signature = signature
        self._batch_tensors = parse_batch_tensors(config)
        self._paths = {
            (side, each.name): f"{side}[{index}]"
            for side, tensors in (("input", config.input), ("output", config.output))
            for index, each in enumerate(tensors)
        }

    def findings(self) -> Iterator[Finding]:
        spec, signature = self._spec, self._signature
        batch_inputs = self._batch_tensors.input_types
        expected = sum(not each.is_optional for each in spec.inputs.values())
        expected += len(spec.control_inputs) + len(spec.states) + len(batch_inputs)
        if len(signature.inputs) != expected:
            yield Finding(
                f"unable to load model '{spec.name}', configuration expects {expected} inputs, model provides "
                f"{len(signature.inputs)}",
                "input",
            )
        for tensor in spec.inputs.values():
            yield from self._input(tensor)
        for name, data_type in batch_inputs.items():
            yield from self._tensor("input", name, data_type, None, signature.inputs)
        for tensor in spec.outputs.values():
            dims = None if tensor.name in self._batch_tensors.scattered else tensor.model_dims
            yield from self._tensor("output", tensor.name, tensor.data_type, dims, signature.outputs, is_exact=True)
        # Both tensors of each state are checked: the output of one request becomes the input of the next.
        for state in spec.states:
            yield from self._tensor("input", state.input_name, state.data_type, state.dims, signature.inputs)
            yield from self._tensor("output", state.output_name, state.data_type, state.dims, signature.outputs)

    def _input(self, tensor: TensorSpec) -> Iterator[Finding]:
        name, allowed = tensor.name, self._signature.inputs | self._signature.optional_inputs
        if tensor.is_optional and self._spec.max_batch_size:
            yield Finding(
                f"unable to load model '{self._spec.name}', optional input '{name}' is not supported for models that "
                "support batching",
                self._path("input", name, "optional"),
            )
        dims = None if tensor.allows_ragged else tensor.model_dims
        yield from self._tensor("input", name, tensor.data_type, dims, allowed)
        if tensor.allows_ragged and name in allowed:
            yield from self._ragged(tensor, allowed[name])

    def _path(self, side: str, name: str, field: str) -> str:
        path = self._paths.get((side, name))
        return f"{path}.{field}" if path is not None else ""

    def _tensor(
        self,
        side: str,
        name: str,
        data_type: DataType,
        dims: Sequence[int] | None,
        allowed: Mapping[str, TensorSignature],
        *,
        is_exact: bool = False,
    ) -> Iterator[Finding]:
        """Check a tensor by its name, type and, unless they are None, `dims`."""
        model = allowed.get(name)
        if model is None:
            message = f"unexpected inference {side} '{name}', allowed {side}s are: {', '.join(sorted(allowed))}"
            yield Finding(message, self._path(side, name, "name"))
            return
        if data_type is not model.data_type:
            yield Finding(
                f"unable to load model '{self._spec.name}', configuration expects datatype {data_type.config_name} for "
                f"{side} '{name}', model provides {model.data_type.config_name}",
                self._path(side, name, "data_type"),
            )
        message = "" if dims is None else _dims_problem(self._spec, dims, model, is_exact=is_exact)
        if message:
            yield Finding(message, self._path(side, name, "dims"))

    def _ragged(self, tensor: TensorSpec, model: TensorSignature) -> Iterator[Finding]:
        """Check that a ragged input has one dimension: its rows are concatenated."""
        start = (
            f"unable to load model '{self._spec.name}', configuration expects model provides input with shape [-1] for "
            f"ragged input '{tensor.name}'"
        )
        path = self._path("input", tensor.name, "allow_ragged_batch")
        if tensor.is_optional:
            yield Finding(f"{start}, which is not supported for optional input", path)
        elif model.dims != (-1,):
            yield Finding(f"{start}, model provides {format_shape(model.dims)}", path)


def _dims_problem(spec: ModelSpec, dims: Sequence[int], model: TensorSignature, *, is_exact: bool) -> str:
    """Return what is wrong with the dims of a tensor; "" where they fit."""
    start = f"model '{spec.name}', tensor '{model.name}'"
    if not model.dims:
        if all(size == 1 for size in dims):
            return ""
        return (
            f"unable to load model '{spec.name}', scalar tensor '{model.name}', should only provide 1 in the "
            f"model configuration when the model doesn't support batching. Model configuration provided: "
            f"{format_shape(dims)}."
        )
    is_batching = spec.max_batch_size > 0
    if is_batching and model.dims[0] != -1:
        return (
            f"{start}: for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {format_shape(model.dims)}"
        )
    full = (-1, *dims) if is_batching else tuple(dims)
    if _fits(model.dims, full, is_exact):
        return ""
    expected = f"{start}: the model expects {len(model.dims)} dimensions (shape {format_shape(model.dims)})"
    shape = (
        f"an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
        f"shape {format_shape(full)}"
        if is_batching
        else f"shape {format_shape(full)}"
    )
    return f"{expected} but the model configuration specifies {len(full)} dimensions ({shape})"


def _fits(model: Sequence[int], dims: Sequence[int], is_exact: bool) -> bool:
    """Return whether the dims match. The configuration may fix sizes that the model leaves open unless `is_exact`."""
    return len(model) == len(dims) and all(
        size == configured or (size == -1 and not is_exact) for size, configured in zip(model, dims, strict=True)
    )
