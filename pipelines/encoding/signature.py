"""I/O signatures of encoder models: which inputs a model takes texts by, and which output holds its vectors."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import Vectors
from sluice.pipelines.stages.tokenizer_model import (
    ATTENTION_MASK,
    INPUT_IDS,
    TOKEN_INPUTS,
    TOKEN_TYPE_IDS,
    TokenizerModel,
)
from sluice.serving.backend import ModelLookup
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Array, Tensor

_TOKENIZER_MODEL = "tokenizer_model"
_FLOATS = ("FP32", "FP16", "FP64", "BF16")

Inputs = Sequence[str] | Sequence[list[int]]
"""Texts, or the token ids of each."""

Mask = NDArray[np.bool_]
"""[rows, tokens]; True for every token that is not padding."""


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Input tensors of one request, one row for each text. `mask` is set for token inputs, whose rows are padded."""

    inputs: dict[str, Tensor]
    mask: Mask | None = None


class TextInputs:
    """Inputs of an encoder that tokenizes by itself: one BYTES input, one text a row."""

    takes_ids = False

    def __init__(self, spec: ModelSpec, text: TensorSpec) -> None:
        self._name = text.name
        self._is_batching = spec.max_batch_size > 0
        # Only the model knows which token states of a shorter row are padding, so such texts go one by one.
        can_batch = self._is_batching and not is_token_states(find_vector_output(spec))
        self.max_rows = spec.max_batch_size if can_batch else 1

    async def build_batch(self, texts: Inputs) -> EncoderBatch:
        array = np.array([text.encode() for text in texts if isinstance(text, str)], np.object_)
        shape = (len(texts), 1) if self._is_batching else (len(texts),)
        return EncoderBatch({self._name: Tensor.of(self._name, array.reshape(shape))})


class TokenInputs:
    """Inputs of a BERT-like encoder: `input_ids`, and whichever of the mask and the token types the model declares."""

    takes_ids = True

    def __init__(self, spec: ModelSpec, tokenizer: TokenizerModel) -> None:
        self._spec = spec
        self._tokenizer = tokenizer.tokenizer
        self.max_rows = max(spec.max_batch_size, 1)

    async def build_batch(self, texts: Inputs) -> EncoderBatch:
        token_ids = [each for each in texts if not isinstance(each, str)]
        if not token_ids:
            token_ids = await asyncio.to_thread(self._tokenizer.encode_long, cast(Sequence[str], texts))
        longest = max(1, max(map(len, token_ids)))
        lengths = np.array([len(ids) for ids in token_ids])
        mask = np.arange(longest) < lengths[:, None]
        ids = np.full(mask.shape, self._tokenizer.pad_id, np.int64)
        ids[mask] = np.concatenate([np.array(each, np.int64) for each in token_ids])
        values = {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPE_IDS: np.zeros_like(ids)}
        return EncoderBatch({name: self._tensor(name, values[name]) for name in self._spec.inputs}, mask)

    def _tensor(self, name: str, values: Array) -> Tensor:
        data_type = self._spec.inputs[name].data_type
        array = values.astype(data_type.dtype)
        if self._spec.max_batch_size == 0:
            array = array[0]
        return Tensor(name, data_type.name, array.shape, array=array)


EncoderInputs = TextInputs | TokenInputs
"""Turns texts into the inputs that one encoder declares. A request holds at most `max_rows` texts."""


def choose_inputs(model: Model, models: ModelLookup) -> EncoderInputs:
    """Choose how to pass texts to the model. Raises SluiceError INVALID, which names the model, if it takes none."""
    inputs = model.spec.inputs
    required = [each for each in inputs.values() if not each.is_optional]
    if len(required) == 1 and required[0].data_type is BYTES and required[0].dims in ((1,), (-1,)):
        return TextInputs(model.spec, required[0])
    if INPUT_IDS in inputs and inputs.keys() <= TOKEN_INPUTS and len(inputs[INPUT_IDS].dims) == 1:
        tokenizer = find_tokenizer(model, models)
        if tokenizer is not None:
            return TokenInputs(model.spec, tokenizer)
        raise _not_an_encoder(model, f"it takes tokens: name whose in its parameter '{_TOKENIZER_MODEL}'")
    expected = f"the one input it needs must be a text (TYPE_STRING, dims [ 1 ]), or '{INPUT_IDS}' (dims [ -1 ])"
    raise _not_an_encoder(model, f"{expected}; it takes {', '.join(inputs)}")


def find_tokenizer(model: Model, models: ModelLookup) -> TokenizerModel | None:
    """Return the tokenizer that the parameter `tokenizer_model` names, else an ensemble's tokenizer step, else None.

    Raises INVALID if the parameter names another kind of model, and whatever the lookup raises.
    """
    if _TOKENIZER_MODEL in model.config.parameters:
        name = model.config.parameters[_TOKENIZER_MODEL].string_value
        found = models.find(name)
        if not isinstance(found, TokenizerModel):
            reason = f"'{name}', its parameter '{_TOKENIZER_MODEL}', has another backend than tokenizer"
            raise _not_an_encoder(model, reason)
        return found
    steps = (models.find(step.model_name, step.model_version) for step in model.config.ensemble_scheduling.step)
    return next((each for each in steps if isinstance(each, TokenizerModel)), None)


def _not_an_encoder(model: Model, reason: str) -> SluiceError:
    return invalid("encoder", f"model '{model.name}' cannot be used as an encoder: {reason}")


def find_vector_output(spec: ModelSpec) -> TensorSpec:
    """Return the output that holds vectors. Raises INVALID, which names the model, unless exactly one qualifies."""
    found = [each for each in spec.outputs.values() if each.data_type.name in _FLOATS and len(each.dims) in (1, 2)]
    if len(found) != 1:
        names = ", ".join(each.name for each in found) or "none"
        expected = "one output of floats: [dim], a vector, or [-1, dim], the states of the tokens"
        raise invalid("encoder", f"model '{spec.name}' is no encoder: it must have {expected}; it has {names}")
    return found[0]


def is_token_states(output: TensorSpec) -> bool:
    """Whether the output is [tokens, dim] and has to be pooled into one vector."""
    return len(output.dims) == 2


def read_vectors(response: InferResponse, spec: ModelSpec, output: TensorSpec, mask: Mask | None) -> Vectors:
    """Return the response's vectors as [rows, dim] float32, each of length 1. Without a `mask` all states are pooled.

    Raises INTERNAL if the response differs from the model's configuration.
    """
    tensor = next((each for each in response.outputs if each.name == output.name), None)
    if tensor is None:
        raise SluiceError(ErrorCode.INTERNAL, f"model '{spec.name}' gave no '{output.name}'")
    array = np.asarray(tensor.array, np.float32)
    if spec.max_batch_size == 0:
        array = array[None]
    if is_token_states(output) and array.ndim == 3:
        array = _mean_pool(array, mask)
    if array.ndim != 2 or not np.isfinite(array).all():
        raise SluiceError(ErrorCode.INTERNAL, f"output '{output.name}' of model '{spec.name}' holds no vectors")
    return normalize(array)


def normalize(vectors: Array) -> Vectors:
    """Scale each row to length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _mean_pool(states: Array, mask: Mask | None) -> Array:
    if mask is None:
        return np.asarray(states.mean(axis=1))
    return np.asarray((states * mask[:, :, None]).sum(axis=1) / np.maximum(mask.sum(axis=1, keepdims=True), 1))
