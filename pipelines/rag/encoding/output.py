"""The one output of an encoder, as vectors."""

import numpy as np
from numpy.typing import NDArray

from pipelines.rag.types import Vectors
from serving.request import InferResponse
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError, invalid

_FLOATS = ("FP32", "FP16", "FP64", "BF16")
Mask = NDArray[np.bool_]
"""[rows, tokens]: which tokens are no padding."""


def vector_output(spec: ModelSpec) -> TensorSpec:
    """The output with vectors. Raises INVALID, which names the model, where none or several could be it."""
    found = [each for each in spec.outputs.values() if each.data_type.name in _FLOATS and len(each.dims) in (1, 2)]
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        expected = "one output of floats: [dim], a vector, or [-1, dim], the states of the tokens"
        raise invalid("encoder", f"model '{spec.name}' is no encoder: it must have {expected}; it has {names}")
    return found[0]


def gives_states(output: TensorSpec) -> bool:
    """Whether it is [tokens, dim], which is to be pooled."""
    return len(output.dims) == 2


def vectors_of(response: InferResponse, spec: ModelSpec, output: TensorSpec, mask: Mask | None) -> Vectors:
    """[rows, dim] float32, each of length 1. `mask` None: every state counts.

    Raises INTERNAL for what the configuration did not promise.
    """
    tensor = next((each for each in response.outputs if each.name == output.name), None)
    if tensor is None:
        raise SluiceError(ErrorCode.INTERNAL, f"model '{spec.name}' gave no '{output.name}'")
    array = np.asarray(tensor.array, np.float32)
    if spec.max_batch_size == 0:
        array = array[None]
    if gives_states(output) and array.ndim == 3:
        array = _pooled(array, mask)
    if array.ndim != 2 or not np.isfinite(array).all():
        raise SluiceError(ErrorCode.INTERNAL, f"output '{output.name}' of model '{spec.name}' holds no vectors")
    return normalised(array)


def normalised(vectors: Array) -> Vectors:
    """Each row of length 1; one of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _pooled(states: Array, mask: Mask | None) -> Array:
    """The mean over a row's tokens, and so the direction of their sum."""
    if mask is None:
        return np.asarray(states.mean(axis=1))
    return np.asarray((states * mask[:, :, None]).sum(axis=1) / np.maximum(mask.sum(axis=1, keepdims=True), 1))
