"""The requests of a batch as the arrays of one run, and its results as their responses."""

from collections.abc import Sequence
from math import prod

import numpy as np

from serving.backends.arrays.batch_tensors import BatchTensors
from serving.backends.arrays.session import ArraySession
from serving.backends.arrays.strings import bytes_array, text_array
from serving.request import InferRequest
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError


class BatchForm:
    """How one model's requests are joined along their first dimension, and taken apart again."""

    def __init__(self, spec: ModelSpec, session: ArraySession, batch_tensors: BatchTensors | None = None) -> None:
        """`batch_tensors`: what the configuration adds to a batch; None where it adds nothing."""
        self._spec = spec
        self._library = session.library
        self._strings_are_text = session.strings_are_text
        self._batch_tensors = batch_tensors or BatchTensors()
        signature = session.signature
        self._scalar_inputs = {
            name for name, each in (signature.inputs | signature.optional_inputs).items() if not each.dims
        }
        self.may_be_repeated = not spec.has_sequences or bool(spec.states)
        """Whether a run that failed leaves nothing behind in the model: not where it keeps sequences' states itself."""
        self._ragged_inputs = {name for name, each in spec.inputs.items() if each.allows_ragged}
        self._states = frozenset(each.output_name for each in spec.states)
        self._outputs = spec.outputs | {
            each.output_name: TensorSpec(each.output_name, each.data_type, each.dims)
            for each in spec.states
            if each.output_name not in spec.outputs
        }

    def outputs_of(self, requests: Sequence[InferRequest]) -> list[str]:
        """What any of them asks for, in the model's order, and what the next requests of their sequences need."""
        if any(not request.requested_outputs for request in requests):
            return list(self._outputs)
        asked = self._states.union(*(request.requested_outputs for request in requests))
        return [name for name in self._outputs if name in asked]

    def joined(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """The inputs of all. Raises SluiceError INVALID for strings that are no text."""
        arrays = {name: self._joined(name, requests) for name in requests[0].inputs}
        for describing in self._batch_tensors.inputs:
            arrays |= dict.fromkeys(describing.names, describing.array(requests))
        return arrays

    def _joined(self, name: str, requests: Sequence[InferRequest]) -> Array:
        if name in self._ragged_inputs:
            return np.concatenate([self._input(request, request.inputs[name]).ravel() for request in requests])
        if len(requests) == 1:
            return self._input(requests[0], requests[0].inputs[name])
        return np.concatenate([self._input(request, request.inputs[name]) for request in requests])

    def _input(self, request: InferRequest, tensor: Tensor) -> Array:
        array = tensor.array
        if tensor.data_type is BYTES and self._strings_are_text:
            try:
                array = text_array(array)
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

    def divided(
        self, requests: Sequence[InferRequest], outputs: Sequence[str], arrays: Sequence[Array]
    ) -> list[list[Tensor]]:
        """Each request's outputs: its states, and those that it asked for.

        Raises SluiceError INTERNAL where rows do not add up.
        """
        columns = [
            (self._outputs[name], self._parts(requests, name, array))
            for name, array in zip(outputs, arrays, strict=True)
        ]
        return [
            [_tensor(spec, parts[index]) for spec, parts in columns if self._is_wanted(spec.name, request)]
            for index, request in enumerate(requests)
        ]

    def _is_wanted(self, name: str, request: InferRequest) -> bool:
        asked = request.requested_outputs
        return not asked or name in asked or name in self._states

    def _parts(self, requests: Sequence[InferRequest], name: str, array: Array) -> list[Array]:
        """Of one output, a part a request."""
        if source := self._batch_tensors.scattered.get(name):
            return self._scattered(requests, name, source, array.ravel())
        if len(requests) == 1:
            return [array]
        ends = np.cumsum([request.batch_size for request in requests]).tolist()
        if array.shape[:1] != (ends[-1],):
            raise self._misfit(name, array, f"a batch of {ends[-1]}")
        return [array[end - request.batch_size : end] for request, end in zip(requests, ends, strict=True)]

    def _scattered(self, requests: Sequence[InferRequest], name: str, source: str, flat: Array) -> list[Array]:
        """One part behind the other, each in the output's shape with its open sizes as the source has them."""
        spec = self._outputs[name]
        dims = spec.dims if spec.reshape is None else spec.reshape
        declared = (-1, *dims) if self._spec.max_batch_size > 0 else dims
        parts, start = [], 0
        for request in requests:
            given = request.inputs[source].shape
            shape = tuple(given[index] if size == -1 else size for index, size in enumerate(declared))
            end = start + prod(shape)
            if end > flat.size:
                raise self._misfit(name, flat, f"parts in the shapes of input '{source}'")
            parts.append(flat[start:end].reshape(shape))
            start = end
        return parts

    def _misfit(self, name: str, array: Array, expected: str) -> SluiceError:
        message = f"output '{name}' of model '{self._spec.name}' has shape {list(array.shape)} for {expected}"
        return SluiceError(ErrorCode.INTERNAL, message)


def _tensor(spec: TensorSpec, array: Array) -> Tensor:
    if not array.ndim:
        array = array.reshape(spec.dims if spec.reshape is None else spec.reshape)
    if spec.data_type is BYTES:
        array = bytes_array(array)
    return Tensor(spec.name, spec.data_type.name, array.shape, array=array)
