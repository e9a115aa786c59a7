"""What describes a batch to the model that runs it: `batch_input`, `batch_output`. Values and shapes are Triton's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import BatchInput, BatchOutput, ModelConfig

from serving.request import InferRequest
from serving.tensors import datatypes
from serving.tensors.datatypes import DataType
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

_Shapes = Sequence[tuple[int, ...]]
"""Of one input, a request each, with its batch dimension."""
_DATA_TYPES = ("TYPE_INT32", "TYPE_FP32")


def _counts(shapes: _Shapes) -> list[int]:
    return [prod(shape) for shape in shapes]


def _item_shapes(shapes: _Shapes) -> Array:
    """`[rows, rank]`: a request of several rows repeats its shape."""
    return np.repeat([shape[1:] for shape in shapes], [shape[0] for shape in shapes], axis=0)


_VALUES: dict[int, Callable[[_Shapes], ArrayLike]] = {
    BatchInput.BATCH_ELEMENT_COUNT: _counts,
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT: lambda shapes: list(accumulate(_counts(shapes))),
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: list(accumulate(_counts(shapes), initial=0)),
    # Its shape is what it says; Triton leaves the values undefined.
    BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(max(_counts(shapes))),
    BatchInput.BATCH_ITEM_SHAPE: _item_shapes,
    BatchInput.BATCH_ITEM_SHAPE_FLATTEN: lambda shapes: _item_shapes(shapes).ravel(),
}


@dataclass(frozen=True, slots=True)
class DescribingInput:
    """One `batch_input`: the same values under each of `names`. `source` is the input that it tells about."""

    names: tuple[str, ...]
    source: str
    data_type: DataType
    values: Callable[[_Shapes], ArrayLike]

    def array(self, requests: Sequence[InferRequest]) -> Array:
        """For a batch of `requests`: an entry a request, for item shapes one a row."""
        return np.asarray(self.values([request.inputs[self.source].shape for request in requests])).astype(
            self.data_type.dtype
        )


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A model's `inputs`, and of outputs that are `scattered` the input whose shape each request's part has."""

    inputs: tuple[DescribingInput, ...] = ()
    scattered: Mapping[str, str] = field(default_factory=dict)

    @property
    def input_types(self) -> dict[str, DataType]:
        """By name."""
        return {name: each.data_type for each in self.inputs for name in each.names}


def batch_tensors_of(config: ModelConfig) -> BatchTensors:
    """Raises SluiceError INVALID, in Triton's words, for what no model can have."""
    return BatchTensors(
        tuple(_describing_input(config, each) for each in config.batch_input),
        {name: _source_of(config, each, "output") for each in config.batch_output for name in _targets(config, each)},
    )


def _describing_input(config: ModelConfig, given: BatchInput) -> DescribingInput:
    source = _source_of(config, given, "input")
    data_type = datatypes.of_config(model_config_pb2.DataType.Name(given.data_type))
    if data_type is None or data_type.config_name not in _DATA_TYPES:
        raise _invalid(f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {config.name}")
    return DescribingInput(tuple(given.target_name), source, data_type, _VALUES[given.kind])


def _source_of(config: ModelConfig, given: BatchInput | BatchOutput, side: str) -> str:
    sources = given.source_input
    if len(sources) != 1:
        kind: Any = type(given).Kind
        raise _invalid(
            f"batch {side} kind '{kind.Name(given.kind)}' expects 1 source input, got {len(sources)} for {config.name}"
        )
    found = next((each for each in config.input if each.name == sources[0]), None)
    if found is None:
        raise _invalid(f"unknown source input name '{sources[0]}' for {config.name}")
    if found.optional:
        raise _invalid(f"source input '{found.name}' of a batch {side} must not be optional for {config.name}")
    return str(found.name)


def _targets(config: ModelConfig, given: BatchOutput) -> Sequence[str]:
    outputs = {each.name for each in config.output}
    for name in given.target_name:
        if name not in outputs:
            raise _invalid(f"unknown target output name '{name}' for {config.name}")
    return list(given.target_name)


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
