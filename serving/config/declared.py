"""Tensors that a backend's models may declare: those that config.pbtxt leaves out are completed, others are refused."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from serving.tensors.datatypes import DATA_TYPES
from sluice.errors import invalid


@dataclass(frozen=True, slots=True)
class Declared:
    """An input or output of a kind of model. `dims` leave out the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = False

    @property
    def number(self) -> int:
        """Of its type in a configuration."""
        return int(DataType.Value(DATA_TYPES[self.datatype].config_name))


def completed(config: ModelConfig, inputs: Sequence[Declared], outputs: Sequence[Declared]) -> ModelConfig:
    """`config` with all inputs where it declares none, and all outputs where it declares none.

    Raises SluiceError INVALID for a tensor that is not among them, of another type, or missing though it is needed.
    """
    whole = ModelConfig()
    whole.CopyFrom(config)
    if not whole.input:
        whole.input.extend(
            ModelInput(name=each.name, data_type=each.number, dims=each.dims, optional=each.is_optional)
            for each in inputs
        )
    if not whole.output:
        whole.output.extend(ModelOutput(name=each.name, data_type=each.number, dims=each.dims) for each in outputs)
    _check(whole.name, "input", whole.input, inputs)
    _check(whole.name, "output", whole.output, outputs)
    given = {each.name for each in whole.input}
    for each in inputs:
        if not each.is_optional and each.name not in given:
            raise invalid("input", f"model '{whole.name}' must declare the input '{each.name}' ({each.datatype})")
    return whole


def _check(
    model: str, kind: str, given: Sequence[ModelInput] | Sequence[ModelOutput], known: Sequence[Declared]
) -> None:
    by_name = {each.name: each for each in known}
    for tensor in given:
        wanted = by_name.get(tensor.name)
        if wanted is None:
            there_are = ", ".join(by_name)
            raise invalid(kind, f"model '{model}' declares the {kind} '{tensor.name}'; there are {there_are}")
        if tensor.data_type != wanted.number:
            message = f"{kind} '{tensor.name}' of model '{model}' must be of type {wanted.datatype}"
            raise invalid(kind, f"{message}, got {DataType.Name(tensor.data_type)}")
