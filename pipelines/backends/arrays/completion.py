"""What a model's signature adds to a configuration that leaves out inputs or outputs. The rules are Triton's."""

from collections.abc import Iterable
from typing import Any

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.arrays.signature import Signature, TensorSignature


def needs_completion(config: ModelConfig) -> bool:
    """Whether the model has to be opened for it. One that says its inputs and outputs is taken by its word."""
    return not (config.input and config.output)


def complete_config(config: ModelConfig, signature: Signature, default_max_batch_size: int) -> None:
    """Fill in batch size, dynamic batching, inputs and outputs.

    Raises SluiceError INVALID where `max_batch_size` asks for batches that the model cannot take.
    """
    _complete_batching(config, signature, default_max_batch_size)
    if not config.input:
        _add(config.input, signature.inputs.values(), config.max_batch_size > 0)
    if not config.output:
        _add(config.output, signature.outputs.values(), config.max_batch_size > 0)


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
