"""An open TorchScript model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.pytorch.options import TorchOptions
from sluice.serving.backends.pytorch.session import TorchSession, extract_message
from sluice.serving.backends.pytorch.signature import (
    ConfiguredTensors,
    check_not_empty,
    check_output_index,
    match_inputs,
    output_positions,
)
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import BYTES

_TENSOR, _OPTIONAL_TENSOR, _STRINGS = "Tensor", "Optional[Tensor]", "List[str]"


class TorchScriptSession(TorchSession):
    """Runs a TorchScript module, whose `forward` takes tensors and lists of strings, or one dictionary of tensors."""

    def __init__(
        self,
        path: Path,
        tensors: ConfiguredTensors,
        options: TorchOptions,
        device: torch.device,
        *,
        is_placed: bool = True,
    ) -> None:
        """Read the file: call it on a thread.

        The module goes to `device` if `is_placed`; else it stays where the file puts it, and inputs stay on the CPU.
        Raises INTERNAL with PyTorch's reason, INVALID where the configuration does not fit `forward`.
        """
        super().__init__(tensors, options, device)
        spec = tensors.spec
        self._module: Any = _load(path, spec.name, options, device if is_placed else None)
        arguments, results = _read_schema(self._module, spec.name)
        self._takes_dict = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
        self._num_arguments = len(arguments)
        self._input_positions: dict[str, int] = {}
        if self._takes_dict:
            check_not_empty("input", list(spec.inputs), "forward takes one dictionary, named are its keys")
        else:
            self._input_positions = _match_inputs(tensors, arguments)
        self._output_positions = _match_outputs(tensors, results)
        _check_strings_are_flat(spec)

    def _compute(self, values: dict[str, object]) -> Sequence[object] | dict[str, object]:
        if self._takes_dict:
            return _split_results(self._module(values))
        arguments: list[object] = [None] * self._num_arguments
        for name, value in values.items():
            arguments[self._input_positions[name]] = value
        return _split_results(self._module(*arguments))

    def close(self) -> None:
        self._module = None


def _split_results(result: Any) -> Sequence[object] | dict[str, object]:
    """Return the results within what `forward` returned. A list of strings is one result."""
    if isinstance(result, dict | tuple):
        return result
    if isinstance(result, list) and not all(isinstance(each, str) for each in result):
        return result
    return (result,)


def _load(path: Path, model: str, options: TorchOptions, device: torch.device | None) -> Any:
    try:
        with torch.inference_mode(options.uses_inference_mode):
            return torch.jit.load(path, map_location=device)
    except Exception as error:
        raise SluiceError(ErrorCode.INTERNAL, f"failed to load model '{model}': {extract_message(error)}") from error


def _read_schema(module: Any, model: str) -> tuple[list[Any], Any]:
    """Return the arguments of `forward` without `self`, and the type of what it returns."""
    if not hasattr(module, "forward"):
        raise invalid_argument(f"failed to load model '{model}': Method 'forward' is not defined.")
    schema = module.forward.schema
    arguments = [each for each in schema.arguments if each.type.kind() != "ClassType"]
    return arguments, schema.returns[0].type


def _match_inputs(tensors: ConfiguredTensors, arguments: Sequence[Any]) -> dict[str, int]:
    _check_argument_types(arguments)
    names = [each.name for each in arguments]
    spec = tensors.spec
    positions = match_inputs(spec.name, tensors.inputs, tensors.batcher_inputs, names)
    for tensor in spec.inputs.values():
        _check_input(spec.name, tensor, str(arguments[positions[tensor.name]].type))
    return positions


def _match_outputs(tensors: ConfiguredTensors, results: Any) -> dict[str, int]:
    """Return the outputs' positions in what `forward` returns. A dictionary has them by name instead."""
    positions = output_positions(tensors.spec)
    if results.kind() == "TupleType":
        for name, position in positions.items():
            check_output_index(name, position, len(results.elements()))
    return positions


def _check_argument_types(arguments: Sequence[Any]) -> None:
    for each in arguments:
        if each.type.kind() == "DictType":
            raise invalid_argument(
                "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, Tensor) is "
                "supported."
            )
        if str(each.type) not in (_TENSOR, _OPTIONAL_TENSOR, _STRINGS):
            raise invalid_argument(
                f"An input of type '{each.type}' was detected in the model. Only a single input of type Dict(str, "
                "Tensor) or input(s) of type Tensor are supported."
            )


def _check_input(model: str, tensor: TensorSpec, provided: str) -> None:
    """Check that strings go to a list of strings, and that an optional input goes to an argument that may be None."""
    if (tensor.data_type is BYTES) != (provided == _STRINGS):
        raise invalid_argument(
            f"unable to load model '{model}', configuration expects datatype {tensor.data_type.config_name} for input "
            f"'{tensor.name}', model provides {provided}"
        )
    if tensor.is_optional and provided != _OPTIONAL_TENSOR:
        raise invalid_argument(
            f"unable to load model '{model}', input '{tensor.name}' is optional in the configuration, and not in the "
            f"model, where it is a {provided}"
        )


def _check_strings_are_flat(spec: ModelSpec) -> None:
    for side, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for tensor in tensors.values():
            if tensor.data_type is BYTES and len(tensor.model_dims) + (spec.max_batch_size > 0) > 1:
                raise invalid_argument(
                    f"Triton only supports 1 dimensional List of String as {side} for '{tensor.name}' for model "
                    f"'{spec.name}'"
                )
