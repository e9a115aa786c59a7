"""The requests of a batch as the arrays of one run, and its results as their responses."""

from collections.abc import Sequence

import numpy as np

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.arrays.session import ArraySession
from pipelines.backends.arrays.strings import bytes_array, text_array
from pipelines.inference.spec import ModelSpec, TensorSpec
from pipelines.inference.types import InferRequest
from pipelines.tensors.datatypes import BYTES
from pipelines.tensors.tensor import Array, Tensor


class BatchForm:
    """How one model's requests are joined along their first dimension, and taken apart again."""

    def __init__(self, spec: ModelSpec, session: ArraySession) -> None:
        self._spec = spec
        self._library = session.library
        self._strings_are_text = session.strings_are_text
        signature = session.signature
        self._scalar_inputs = {
            name for name, each in (signature.inputs | signature.optional_inputs).items() if not each.dims
        }

    def outputs_of(self, requests: Sequence[InferRequest]) -> list[str]:
        """What any of them asks for, in the model's order."""
        if any(not request.requested_outputs for request in requests):
            return list(self._spec.outputs)
        asked = {name for request in requests for name in request.requested_outputs}
        return [name for name in self._spec.outputs if name in asked]

    def joined(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """The inputs of all. Raises SluiceError INVALID for strings that are no text."""
        if len(requests) == 1:
            return {name: self._input(requests[0], tensor) for name, tensor in requests[0].inputs.items()}
        return {
            name: np.concatenate([self._input(request, request.inputs[name]) for request in requests])
            for name in requests[0].inputs
        }

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
        """Each request's outputs, those that it asked for. Raises SluiceError INTERNAL where rows do not add up."""
        specs = [self._spec.outputs[name] for name in outputs]
        if len(requests) == 1:
            return [[_tensor(spec, array) for spec, array in zip(specs, arrays, strict=True)]]
        ends = np.cumsum([request.batch_size for request in requests]).tolist()
        for spec, array in zip(specs, arrays, strict=True):
            if array.shape[:1] != (ends[-1],):
                raise SluiceError(
                    ErrorCode.INTERNAL,
                    f"output '{spec.name}' of model '{self._spec.name}' has shape {list(array.shape)} for a batch of "
                    f"{ends[-1]}",
                )
        return [
            [
                _tensor(spec, array[end - request.batch_size : end])
                for spec, array in zip(specs, arrays, strict=True)
                if not request.requested_outputs or spec.name in request.requested_outputs
            ]
            for request, end in zip(requests, ends, strict=True)
        ]


def _tensor(spec: TensorSpec, array: Array) -> Tensor:
    if not array.ndim:
        array = array.reshape(spec.dims if spec.reshape is None else spec.reshape)
    if spec.data_type is BYTES:
        array = bytes_array(array)
    return Tensor(spec.name, spec.data_type.name, array.shape, array=array)
