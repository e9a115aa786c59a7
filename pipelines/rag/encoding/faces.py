"""What encoders take: texts, or the ids of their tokens."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.rag.encoding.output import Mask, gives_states, vector_output
from pipelines.stages.tokenizer_model import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPE_IDS, TokenizerModel
from serving.backend import ModelLookup
from serving.model import Model
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Array, Tensor
from sluice.errors import SluiceError, invalid

_TOKEN_INPUTS = frozenset({INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS})
_TOKENIZER_MODEL = "tokenizer_model"


@dataclass(frozen=True, slots=True)
class Rows:
    """The inputs of one request, a row a text. `mask` of token inputs, where rows are filled up."""

    inputs: dict[str, Tensor]
    mask: Mask | None = None


class Face(ABC):
    """How one encoder is asked. `max_rows` texts at once at most."""

    max_rows: int

    @abstractmethod
    async def rows(self, texts: Sequence[str]) -> Rows:
        """For at most `max_rows` texts."""


class TextFace(Face):
    """An input of one text a row."""

    def __init__(self, spec: ModelSpec, text: TensorSpec) -> None:
        self._name = text.name
        self._is_batching = spec.max_batch_size > 0
        # Nobody outside the model knows which states of a shorter text's row are padding.
        has_own_rows = self._is_batching and not gives_states(vector_output(spec))
        self.max_rows = spec.max_batch_size if has_own_rows else 1

    async def rows(self, texts: Sequence[str]) -> Rows:
        array = np.array([text.encode() for text in texts], np.object_)
        shape = (len(texts), 1) if self._is_batching else (len(texts),)
        return Rows({self._name: Tensor.of(self._name, array.reshape(shape))})


class TokenFace(Face):
    """`input_ids`, and what else of BERT's inputs it declares; rows are filled up with padding."""

    def __init__(self, spec: ModelSpec, tokenizer: TokenizerModel) -> None:
        self._spec = spec
        self._tokenizer = tokenizer.tokenizer
        self.max_rows = max(spec.max_batch_size, 1)

    async def rows(self, texts: Sequence[str]) -> Rows:
        token_ids = await asyncio.to_thread(self._tokenizer.encode_long, texts)
        longest = max(1, max(map(len, token_ids)))
        lengths = np.array([len(ids) for ids in token_ids])
        mask = np.arange(longest) < lengths[:, None]
        ids = np.full(mask.shape, self._tokenizer.pad_id, np.int64)
        ids[mask] = np.concatenate([np.array(each, np.int64) for each in token_ids])
        values = {INPUT_IDS: ids, ATTENTION_MASK: mask, TOKEN_TYPE_IDS: np.zeros_like(ids)}
        return Rows({name: self._tensor(name, values[name]) for name in self._spec.inputs}, mask)

    def _tensor(self, name: str, values: Array) -> Tensor:
        data_type = self._spec.inputs[name].data_type
        array = values.astype(data_type.dtype)
        if self._spec.max_batch_size == 0:
            array = array[0]
        return Tensor(name, data_type.name, array.shape, array=array)


def face_of(model: Model, models: ModelLookup) -> Face:
    """Raises SluiceError INVALID, which names the model, for one that takes neither."""
    inputs = model.spec.inputs
    needed = [each for each in inputs.values() if not each.is_optional]
    if len(needed) == 1 and needed[0].data_type is BYTES and needed[0].dims in ((1,), (-1,)):
        return TextFace(model.spec, needed[0])
    if INPUT_IDS in inputs and inputs.keys() <= _TOKEN_INPUTS and len(inputs[INPUT_IDS].dims) == 1:
        tokenizer = tokenizer_of(model, models)
        if tokenizer is not None:
            return TokenFace(model.spec, tokenizer)
        raise _no_encoder(model, f"it takes tokens: name whose in its parameter '{_TOKENIZER_MODEL}'")
    expected = f"the one input it needs must be a text (TYPE_STRING, dims [ 1 ]), or '{INPUT_IDS}' (dims [ -1 ])"
    raise _no_encoder(model, f"{expected}; it takes {', '.join(inputs)}")


def tokenizer_of(model: Model, models: ModelLookup) -> TokenizerModel | None:
    """The tokenizer that its parameter `tokenizer_model` names, else an ensemble's own; None where there is none.

    Raises INVALID where the parameter names another kind of model, and what the look-up raises.
    """
    if _TOKENIZER_MODEL in model.config.parameters:
        name = model.config.parameters[_TOKENIZER_MODEL].string_value
        found = models.find(name)
        if not isinstance(found, TokenizerModel):
            raise _no_encoder(
                model, f"'{name}', its parameter '{_TOKENIZER_MODEL}', has another backend than tokenizer"
            )
        return found
    steps = (models.find(step.model_name, step.model_version) for step in model.config.ensemble_scheduling.step)
    return next((each for each in steps if isinstance(each, TokenizerModel)), None)


def _no_encoder(model: Model, reason: str) -> SluiceError:
    return invalid("encoder", f"model '{model.name}' cannot be used as an encoder: {reason}")
