"""Joins the requests of a batch into the arrays of one run, and splits the run's results into their responses.

`batch_input` and `batch_output` of config.pbtxt add tensors that describe the batch; their values and shapes are
Triton's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import ArrayLike
from tritonclient.grpc.model_config_pb2 import BatchInput, ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backends.arrays.session import ArraySession
from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSpec, TensorSpec, read_data_type
from sluice.serving.tensors.byte_strings import object_array
from sluice.serving.tensors.datatypes import BYTES, DataType
from sluice.serving.tensors.tensor import Array, Tensor

_Shapes = Sequence[tuple[int, ...]]
"""Shapes of one input, one for each request, including the batch dimension."""


def _counts(shapes: _Shapes) -> list[int]:
    return [prod(shape) for shape in shapes]


def _item_shapes(shapes: _Shapes) -> Array:
    """Return the item shapes, `[rows, rank]`: a request of several rows repeats its shape."""
    return np.repeat([shape[1:] for shape in shapes], [shape[0] for shape in shapes], axis=0)


_VALUES: dict[int, Callable[[_Shapes], ArrayLike]] = {
    BatchInput.BATCH_ELEMENT_COUNT: _counts,
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT: lambda shapes: list(accumulate(_counts(shapes))),
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: list(accumulate(_counts(shapes), initial=0)),
    # The shape is the value; Triton leaves the elements undefined.
    BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(max(_counts(shapes))),
    BatchInput.BATCH_ITEM_SHAPE: _item_shapes,
    BatchInput.BATCH_ITEM_SHAPE_FLATTEN: lambda shapes: _item_shapes(shapes).ravel(),
}


@dataclass(frozen=True, slots=True)
class BatchInputTensor:
    """One `batch_input`: the same values under each of `names`, computed from the shapes of the input `source`."""

    names: tuple[str, ...]
    source: str
    data_type: DataType
    values: Callable[[_Shapes], ArrayLike]

    def build(self, requests: Sequence[InferRequest]) -> Array:
        """Return a batch's values: one entry for each request, or for each row if they are item shapes."""
        return np.asarray(self.values([request.inputs[self.source].shape for request in requests])).astype(
            self.data_type.dtype
        )


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """A model's batch inputs. `scattered` has, by batch output, the input whose shapes its parts take."""

    inputs: tuple[BatchInputTensor, ...] = ()
    scattered: Mapping[str, str] = field(default_factory=dict)

    @property
    def input_types(self) -> dict[str, DataType]:
        """Data types of the batch inputs, by name."""
        return {name: each.data_type for each in self.inputs for name in each.names}


def parse_batch_tensors(config: ModelConfig) -> BatchTensors:
    """Parse `batch_input` and `batch_output` of a checked configuration. Raises INVALID for an optional source."""
    optional = {each.name for each in config.input if each.optional}
    for side, given in (("input", config.batch_input), ("output", config.batch_output)):
        for source in (each.source_input[0] for each in given):
            if source in optional:
                raise invalid_argument(
                    f"source input '{source}' of a batch {side} must not be optional for {config.name}"
                )
    return BatchTensors(
        tuple(_parse_batch_input(each) for each in config.batch_input),
        {name: each.source_input[0] for each in config.batch_output for name in each.target_name},
    )


def _parse_batch_input(given: BatchInput) -> BatchInputTensor:
    data_type = read_data_type(given.data_type)
    assert data_type is not None, "the configuration has been checked"
    return BatchInputTensor(tuple(given.target_name), given.source_input[0], data_type, _VALUES[given.kind])


class BatchAssembler:
    """Joins a model's requests along their first dimension, and splits the results again."""

    def __init__(self, spec: ModelSpec, session: ArraySession, batch_tensors: BatchTensors | None = None) -> None:
        """`batch_tensors` are those the configuration adds to a batch; None where it adds none."""
        self._spec = spec
        self._library = session.library
        self._strings_are_text = session.strings_are_text
        self._batch_tensors = batch_tensors or BatchTensors()
        signature = session.signature
        self._scalar_inputs = {
            name for name, each in (signature.inputs | signature.optional_inputs).items() if not each.dims
        }
        self.can_rerun = not spec.has_sequences or bool(spec.states)
        """Whether a failed run may be repeated: not where it may have changed states that the model itself keeps."""
        self.keeps_nothing = not spec.has_sequences
        """Whether no request depends on one before."""
        self._ragged_inputs = {name for name, each in spec.inputs.items() if each.allows_ragged}
        self._states = frozenset(each.output_name for each in spec.states)
        self._outputs = spec.outputs | {
            each.output_name: TensorSpec(each.output_name, each.data_type, each.dims)
            for each in spec.states
            if each.output_name not in spec.outputs
        }

    def requested_outputs(self, requests: Sequence[InferRequest]) -> list[str]:
        """Return the outputs that any request asks for, in the model's order, and the states."""
        if any(not request.requested_outputs for request in requests):
            return list(self._outputs)
        requested = self._states.union(*(request.requested_outputs for request in requests))
        return [name for name in self._outputs if name in requested]

    def join_inputs(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the inputs of all requests, joined. Raises INVALID for strings that are not UTF-8 and must be."""
        arrays = {name: self._join_input(name, requests) for name in requests[0].inputs}
        for batch_input in self._batch_tensors.inputs:
            arrays |= dict.fromkeys(batch_input.names, batch_input.build(requests))
        return arrays

    def _join_input(self, name: str, requests: Sequence[InferRequest]) -> Array:
        if name in self._ragged_inputs:
            return np.concatenate([self._convert_input(request, request.inputs[name]).ravel() for request in requests])
        if len(requests) == 1:
            return self._convert_input(requests[0], requests[0].inputs[name])
        return np.concatenate([self._convert_input(request, request.inputs[name]) for request in requests])

    def _convert_input(self, request: InferRequest, tensor: Tensor) -> Array:
        array = tensor.array
        if tensor.data_type is BYTES and self._strings_are_text:
            try:
                array = decode_strings(array)
            except UnicodeDecodeError:
                raise SluiceError(
                    ErrorCode.INVALID,
                    f"{request.log_prefix}inference input '{tensor.name}' for model '{self._spec.name}' holds bytes "
                    f"that are not UTF-8, which the strings of {self._library} have to be",
                    param=tensor.name,
                ) from None
        elif not array.flags.aligned:
            # A view into a message may begin anywhere; kernels count on the type's own alignment.
            array = array.copy()
        # Clients see a scalar as [1].
        return array.reshape(()) if tensor.name in self._scalar_inputs and array.size == 1 else array

    def split_outputs(
        self, requests: Sequence[InferRequest], outputs: Sequence[str], arrays: Sequence[Array]
    ) -> list[list[Tensor]]:
        """Return each request's states and requested outputs. Raises INTERNAL where an output's rows do not add up."""
        columns = [
            (self._outputs[name], self._split_output(requests, name, array))
            for name, array in zip(outputs, arrays, strict=True)
        ]
        return [
            [_build_tensor(spec, parts[index]) for spec, parts in columns if self._is_requested(spec.name, request)]
            for index, request in enumerate(requests)
        ]

    def _is_requested(self, name: str, request: InferRequest) -> bool:
        requested = request.requested_outputs
        return not requested or name in requested or name in self._states

    def _split_output(self, requests: Sequence[InferRequest], name: str, array: Array) -> list[Array]:
        """Return one output's parts, one for each request."""
        if source := self._batch_tensors.scattered.get(name):
            return self._scatter_output(requests, name, source, array.ravel())
        if len(requests) == 1:
            return [array]
        ends = np.cumsum([request.batch_size for request in requests]).tolist()
        if array.shape[:1] != (ends[-1],):
            raise self._shape_error(name, array, f"a batch of {ends[-1]}")
        return [array[end - request.batch_size : end] for request, end in zip(requests, ends, strict=True)]

    def _scatter_output(self, requests: Sequence[InferRequest], name: str, source: str, flat: Array) -> list[Array]:
        """Split a flat output into parts in its declared shape, whose open sizes are the input `source`'s."""
        spec = self._outputs[name]
        declared = (-1, *spec.model_dims) if self._spec.max_batch_size > 0 else spec.model_dims
        parts, start = [], 0
        for request in requests:
            given = request.inputs[source].shape
            shape = tuple(given[index] if size == -1 else size for index, size in enumerate(declared))
            end = start + prod(shape)
            if end > flat.size:
                raise self._shape_error(name, flat, f"parts in the shapes of input '{source}'")
            parts.append(flat[start:end].reshape(shape))
            start = end
        return parts

    def _shape_error(self, name: str, array: Array, expected: str) -> SluiceError:
        message = f"output '{name}' of model '{self._spec.name}' has shape {list(array.shape)} for {expected}"
        return SluiceError(ErrorCode.INTERNAL, message)


def _build_tensor(spec: TensorSpec, array: Array) -> Tensor:
    if not array.ndim:
        array = array.reshape(spec.model_dims)
    if spec.data_type is BYTES:
        array = encode_strings(array)
    return Tensor(spec.name, spec.data_type.name, array.shape, array=array)


def decode_strings(array: Array) -> Array:
    """Return a copy with elements as `str`. Raises UnicodeDecodeError."""
    decoded = [element if isinstance(element, str) else element.decode() for element in array.ravel().tolist()]
    return object_array(decoded, array.shape)


def encode_strings(array: Array) -> Array:
    """Return a copy with elements as `bytes`; the given ones are `str` or `bytes`."""
    encoded = [element.encode() if isinstance(element, str) else element for element in array.ravel().tolist()]
    return object_array(encoded, array.shape)
