"""What a model takes and gives as its configuration says it: PyTorch's files do not."""

from dataclasses import dataclass

from serving.backends.arrays.batch_tensors import BatchTensors
from serving.backends.arrays.signature import Signature, TensorSignature
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import DATA_TYPES, DataType

_FLAG = DATA_TYPES["INT32"]


@dataclass(frozen=True, slots=True)
class ConfiguredTensors:
    """`inputs` are the clients' and those that describe a batch, in the configuration's order.

    `batcher_inputs` are those that the sequence batcher sets: controls and states. `outputs` are the clients', and
    those that a sequence's next request gets.
    """

    spec: ModelSpec
    signature: Signature
    inputs: tuple[str, ...]
    batcher_inputs: tuple[str, ...]
    outputs: dict[str, TensorSpec]


def configured_tensors(spec: ModelSpec, batch_tensors: BatchTensors) -> ConfiguredTensors:
    """Of a complete configuration."""
    outputs = {each.output_name: TensorSpec(each.output_name, each.data_type, each.dims) for each in spec.states}
    outputs |= spec.outputs
    return ConfiguredTensors(
        spec,
        _signature(spec, batch_tensors, outputs),
        (*spec.inputs, *batch_tensors.input_types),
        (*sorted(spec.control_inputs), *(each.input_name for each in spec.states)),
        outputs,
    )


def _signature(spec: ModelSpec, batch_tensors: BatchTensors, outputs: dict[str, TensorSpec]) -> Signature:
    """Control inputs are here by name alone: their type is what the sequence batcher sends."""
    inputs = {name: _of_spec(each, spec) for name, each in spec.inputs.items()}
    optional = {name: inputs.pop(name) for name, each in spec.inputs.items() if each.is_optional}
    inputs |= {name: TensorSignature(name, each, (-1,)) for name, each in batch_tensors.input_types.items()}
    inputs |= {name: _of_dims(name, _FLAG, (1,), spec) for name in spec.control_inputs}
    inputs |= {each.input_name: _of_dims(each.input_name, each.data_type, each.dims, spec) for each in spec.states}
    return Signature(inputs, optional, {name: _of_spec(each, spec) for name, each in outputs.items()})


def _of_spec(tensor: TensorSpec, spec: ModelSpec) -> TensorSignature:
    if tensor.allows_ragged:
        return TensorSignature(tensor.name, tensor.data_type, (-1,))
    dims = tensor.dims if tensor.reshape is None else tensor.reshape
    return _of_dims(tensor.name, tensor.data_type, dims, spec)


def _of_dims(name: str, data_type: DataType, dims: tuple[int, ...], spec: ModelSpec) -> TensorSignature:
    return TensorSignature(name, data_type, (-1, *dims) if spec.max_batch_size else dims)
