"""What a model's signature adds to a configuration that leaves out inputs or outputs. The rules are Triton's."""

from collections.abc import Iterable, Mapping
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.signature import Signature, TensorSignature
from sluice.errors import ErrorCode, SluiceError

DEFAULT_MAX_BATCH_SIZE = 4
"""Triton's `--backend-config=default-max-batch-size`, where it is not given."""


def default_max_batch_size(options: Mapping[str, Mapping[str, str]], backend: str) -> int:
    """The option of that backend, else the one for all. Raises SluiceError INVALID for what is no number."""
    key = "default-max-batch-size"
    text = options.get(backend, {}).get(key) or options.get("", {}).get(key)
    if text is None:
        return DEFAULT_MAX_BATCH_SIZE
    try:
        return int(text)
    except ValueError:
        raise SluiceError(ErrorCode.INVALID, f"'{text}' is no {key}") from None


def needs_completion(config: ModelConfig) -> bool:
    """Whether the model has to be opened for it. One that says its inputs and outputs is taken by its word."""
    return not (config.input and config.output)


def complete_config(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> None:
    """Fill in batch size, dynamic batching, inputs and outputs.

    Raises SluiceError INVALID where `max_batch_size` asks for batches that the model cannot take.
    """
    _complete_batching(config, signature, default_max_batch_size)
    set_by_server = inputs_set_by_server(config)
    is_batching = config.max_batch_size > 0
    if not config.input:
        clients = (each for name, each in signature.inputs.items() if name not in set_by_server)
        _add(config.input, clients, is_batching)
    if not config.output:
        states = {each.output_name for each in config.sequence_batching.state}
        _add(config.output, (each for name, each in signature.outputs.items() if name not in states), is_batching)


def inputs_set_by_server(config: ModelConfig) -> set[str]:
    """Inputs that no client gives."""
    names = {name for each in config.batch_input for name in each.target_name}
    names |= {each.name for each in config.sequence_batching.control_input}
    return names | {each.input_name for each in config.sequence_batching.state}


def _complete_batching(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> None:
    if not signature.can_batch:
        if config.max_batch_size:
            raise SluiceError(
                ErrorCode.INVALID,
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified",
            )
        return
    config.max_batch_size = config.max_batch_size or max(default_max_batch_size, 0)
    if config.max_batch_size > 1 and not config.WhichOneof("scheduling_choice"):
        config.dynamic_batching.SetInParent()


def _add(to: Any, tensors: Iterable[TensorSignature], is_batching: bool) -> None:
    for tensor in tensors:
        entry = to.add(name=tensor.name, data_type=model_config_pb2.DataType.Value(tensor.data_type.config_name))
        dims = tensor.dims[1:] if is_batching else tensor.dims
        # A configuration has no way to say "no dims": there they are [1], which a batch's rows are reshaped from.
        entry.dims.extend(dims or (1,))
        if not dims and is_batching:
            entry.reshape.SetInParent()
