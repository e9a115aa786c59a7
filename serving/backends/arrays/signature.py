"""What a model of arrays takes and gives."""

from dataclasses import dataclass

from serving.tensors.datatypes import DataType


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """`dims` with a batch dimension where the model has one; -1 is any size. No dims: a scalar, or of any shape."""

    name: str
    data_type: DataType
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """By name, in the model's order. `optional_inputs` have a value of their own, which a request may replace."""

    inputs: dict[str, TensorSignature]
    optional_inputs: dict[str, TensorSignature]
    outputs: dict[str, TensorSignature]

    @property
    def can_batch(self) -> bool:
        """Whether each tensor's first dimension is of any size."""
        return all(tensor.dims[:1] == (-1,) for tensor in (*self.inputs.values(), *self.outputs.values()))
