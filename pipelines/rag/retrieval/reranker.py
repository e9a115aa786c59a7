"""Rerankers that are models of the repository: by texts, or by the tokens of question and passage."""

from collections.abc import Sequence

import numpy as np

from pipelines.rag.retrieval.pairs import PairTokenizer
from serving.backend import ModelLookup
from serving.model import Model, infer_one
from serving.request import InferRequest
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

QUERY, DOCUMENTS, SCORES = "query", "documents", "scores"


class ModelReranker:
    """A model that scores passages. Looked up for each call, so that a reload is seen.

    One with the inputs `query` [1] and `documents` [-1], BYTES, gives `scores` [-1]. With `tokenizer` it is a
    cross-encoder: it gets a row for each passage of `input_ids` [-1], and of `attention_mask` and `token_type_ids`
    where it declares them, and gives one number a row as its first output.
    """

    def __init__(self, models: ModelLookup, name: str, tokenizer: PairTokenizer | None = None) -> None:
        self.name = name
        self._models = models
        self._tokenizer = tokenizer

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Raises SluiceError UNAVAILABLE, which names the model, where it does not serve or gives no scores."""
        if not passages:
            return []
        try:
            model = self._models.find(self.name)
            if self._tokenizer is None:
                found = await _score_texts(model, question, passages)
            else:
                found = await _score_tokens(model, self._tokenizer, question, passages)
        except SluiceError as error:
            raise self._failed(error.message) from error
        if len(found) != len(passages):
            raise self._failed(f"it gave {len(found)} scores for {len(passages)} passages")
        if not np.isfinite(found).all():
            raise self._failed("it gave a score that is no number")
        return found

    def _failed(self, why: str) -> SluiceError:
        return SluiceError(ErrorCode.UNAVAILABLE, f"reranker '{self.name}': {why}")


async def _score_texts(model: Model, question: str, passages: Sequence[str]) -> list[float]:
    leading = (1,) if model.spec.max_batch_size > 0 else ()
    return await _numbers(
        model, SCORES, {QUERY: _texts(QUERY, [question], leading), DOCUMENTS: _texts(DOCUMENTS, passages, leading)}
    )


async def _score_tokens(model: Model, tokenizer: PairTokenizer, question: str, passages: Sequence[str]) -> list[float]:
    """As many rows at a time as the model takes."""
    rows = await tokenizer.encode(question, passages)
    size = model.spec.max_batch_size or len(rows)
    scores: list[float] = []
    for start in range(0, len(rows), size):
        columns = tokenizer.padded(rows[start : start + size])
        declared = {name: each for name, each in model.spec.inputs.items() if name in columns}
        inputs = {name: Tensor.of(name, columns[name].astype(each.data_type.dtype)) for name, each in declared.items()}
        scores += await _numbers(model, next(iter(model.spec.outputs)), inputs)
    return scores


async def _numbers(model: Model, name: str, inputs: dict[str, Tensor]) -> list[float]:
    """The elements of the output `name`, in order."""
    response = await infer_one(model, InferRequest(inputs, requested_outputs=(name,)))
    array: Array = response.outputs[0].array
    if array.dtype.kind not in "fiu":
        raise invalid(name, f"its output '{name}' is of type {response.outputs[0].datatype}, not numbers")
    return array.astype(np.float64).ravel().tolist()


def _texts(name: str, texts: Sequence[str], leading: tuple[int, ...]) -> Tensor:
    array = np.array([text.encode() for text in texts], np.object_).reshape(*leading, len(texts))
    return Tensor.of(name, array)
