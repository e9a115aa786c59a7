"""Reranks with a model of the repository, which takes texts or, as a cross-encoder, tokens of question and passage."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from serving.backend import ModelLookup
from serving.model import Model, infer_one
from serving.request import InferRequest
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

QUERY, DOCUMENTS, SCORES = "query", "documents", "scores"
FILENAME = "tokenizer.json"
_MAX_TOKENS = 512
"""Tokens of a pair if the tokenizer's file sets no limit: the number of positions of BERT-like models."""


class ModelReranker:
    """Scores passages with the model `name`, which it looks up on every call so that a reload takes effect.

    Without `tokenizer` the model takes `query` [1] and `documents` [-1], both BYTES, and gives `scores` [-1]. With
    `tokenizer` it is a cross-encoder: for each passage it takes a row of `input_ids` [-1], and of `attention_mask` and
    `token_type_ids` if it declares them, and its first output holds one number a row.
    """

    def __init__(self, models: ModelLookup, name: str, tokenizer: "PairTokenizer | None" = None) -> None:
        self.name = name
        self._models = models
        self._tokenizer = tokenizer

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Return one score for each passage.

        Raises SluiceError UNAVAILABLE, which names the model, if it does not serve or gives no valid scores.
        """
        if not passages:
            return []
        try:
            model = self._models.find(self.name)
            if self._tokenizer is None:
                found = await _score_texts(model, question, passages)
            else:
                found = await _score_tokens(model, self._tokenizer, question, passages)
        except SluiceError as error:
            raise self._failure(error.message) from error
        if len(found) != len(passages):
            raise self._failure(f"it gave {len(found)} scores for {len(passages)} passages")
        if not np.isfinite(found).all():
            raise self._failure("it gave a score that is no number")
        return found

    def _failure(self, why: str) -> SluiceError:
        return SluiceError(ErrorCode.UNAVAILABLE, f"reranker '{self.name}': {why}")


class PairTokenizer:
    """Tokenizes pairs of question and passage, with the special tokens and token types of the tokenizer's file."""

    def __init__(self, path: Path) -> None:
        """Load `path`, a tokenizer.json or its folder. Raises SluiceError UNAVAILABLE if it cannot be read."""
        path = path / FILENAME if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            message = f"cannot load the reranker's tokenizer {path}: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, param="reranker_tokenizer") from error
        limit, padding = self._tokenizer.truncation, self._tokenizer.padding
        self._pad_id = padding["pad_id"] if padding else 0
        self._tokenizer.no_padding()
        # Cuts the longer text of a pair: the passage, unless the question is a whole page.
        self._tokenizer.enable_truncation(limit["max_length"] if limit else _MAX_TOKENS, strategy="longest_first")

    async def encode(self, question: str, passages: Sequence[str]) -> list[tokenizers.Encoding]:
        """Tokenize the question with each passage, in a thread."""
        pairs = [(question, passage) for passage in passages]
        encodings: list[tokenizers.Encoding] = await asyncio.to_thread(self._tokenizer.encode_batch, pairs)
        return encodings

    def build_inputs(self, rows: Sequence[tokenizers.Encoding]) -> dict[str, NDArray[np.int64]]:
        """Build the inputs of a cross-encoder by name, each [rows, longest row], padded."""
        width = max(len(row.ids) for row in rows)
        names = ("input_ids", "attention_mask", "token_type_ids")
        fills = (self._pad_id, 0, 0)
        arrays = [np.full((len(rows), width), fill, np.int64) for fill in fills]
        for index, row in enumerate(rows):
            for array, values in zip(arrays, (row.ids, row.attention_mask, row.type_ids), strict=True):
                array[index, : len(values)] = values
        return dict(zip(names, arrays, strict=True))


async def _score_texts(model: Model, question: str, passages: Sequence[str]) -> list[float]:
    leading = (1,) if model.spec.max_batch_size > 0 else ()
    query = _text_tensor(QUERY, [question], leading)
    documents = _text_tensor(DOCUMENTS, passages, leading)
    return await _infer_numbers(model, SCORES, {QUERY: query, DOCUMENTS: documents})


async def _score_tokens(model: Model, tokenizer: PairTokenizer, question: str, passages: Sequence[str]) -> list[float]:
    """Score pairs of question and passage, as many in one request as the model takes."""
    rows = await tokenizer.encode(question, passages)
    size = model.spec.max_batch_size or len(rows)
    scores: list[float] = []
    for start in range(0, len(rows), size):
        columns = tokenizer.build_inputs(rows[start : start + size])
        declared = {name: each for name, each in model.spec.inputs.items() if name in columns}
        inputs = {name: Tensor.of(name, columns[name].astype(each.data_type.dtype)) for name, each in declared.items()}
        scores += await _infer_numbers(model, next(iter(model.spec.outputs)), inputs)
    return scores


async def _infer_numbers(model: Model, name: str, inputs: dict[str, Tensor]) -> list[float]:
    """Run the model and return the elements of its output `name`, flattened."""
    response = await infer_one(model, InferRequest(inputs, requested_outputs=(name,)))
    array: Array = response.outputs[0].array
    if array.dtype.kind not in "fiu":
        raise invalid(name, f"its output '{name}' is of type {response.outputs[0].datatype}, not numbers")
    return array.astype(np.float64).ravel().tolist()


def _text_tensor(name: str, texts: Sequence[str], leading: tuple[int, ...]) -> Tensor:
    array = np.array([text.encode() for text in texts], np.object_).reshape(*leading, len(texts))
    return Tensor.of(name, array)
