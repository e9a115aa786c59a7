"""Reranks with a model of the repository, which takes texts or, as a cross-encoder, tokens of question and passage."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding.encoder import DOCUMENT_PREFIX, QUERY_PREFIX, TO_THE_MODEL, TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.signature import find_tokenizer
from sluice.pipelines.llm.model import scorer_of
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.stages.tokenizer_model import INPUT_IDS, TOKEN_INPUTS, TextTokenizer
from sluice.pipelines.text.tensor_model import build_text_tensor
from sluice.serving.backend import ModelLookup
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.task_model import gather_all
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Array, Tensor

QUERY, DOCUMENTS, SCORES = "query", "documents", "scores"
FILENAME = "tokenizer.json"
_MAX_TOKENS = 512
"""Tokens of a pair if the tokenizer's file sets no limit: the number of positions of BERT-like models."""

_MAX_CHARS = 100_000
"""Characters of a text that are tokenized: the library keeps hundreds of bytes for each token, also of what it cuts."""


@dataclass(frozen=True, slots=True)
class PassageScores:
    """A score for each passage, and how many tokens the model saw: 0 where it takes texts."""

    values: list[float]
    num_tokens: int


class ModelReranker:
    """Scores passages with the model `name`, which it looks up on every call so that a reload takes effect.

    Without `tokenizer` the model takes `query` [1] and `documents` [-1], both BYTES, and gives `scores` [-1]. With
    `tokenizer` it is a cross-encoder: for each passage it takes a row of `input_ids` [-1], and of `attention_mask` and
    `token_type_ids` if it declares them, and its first output holds one number a row.
    """

    max_model_len = None

    def __init__(self, models: ModelLookup, name: str, tokenizer: "PairTokenizer | None" = None) -> None:
        self.name = name
        self._models = models
        self._tokenizer = tokenizer

    @property
    def created(self) -> int:
        """When the model was loaded, in seconds since 1970. Raises as the lookup does."""
        return self._models.find(self.name).created

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Return one score for each passage.

        Raises SluiceError UNAVAILABLE, which names the model, if it does not serve or gives no valid scores.
        """
        if not passages:
            return []
        try:
            return (await self.score(question, passages)).values
        except SluiceError as error:
            raise SluiceError(ErrorCode.UNAVAILABLE, error.message) from error

    async def score(self, question: str, passages: Sequence[str]) -> PassageScores:
        """Return the scores of one passage or more. Raises the model's own errors, with its name, and UNAVAILABLE if it
        gives no valid scores."""
        try:
            model = self._models.find(self.name)
            if self._tokenizer is None:
                found = PassageScores(await _score_texts(model, question, passages), 0)
            else:
                found = await _score_tokens(model, self._tokenizer, question, passages)
        except SluiceError as error:
            message = self._failure(error.message).message
            raise SluiceError(error.code, message, retry_after_s=error.retry_after_s) from error
        if len(found.values) != len(passages):
            raise self._failure(f"it gave {len(found.values)} scores for {len(passages)} passages")
        if not np.isfinite(found.values).all():
            raise self._failure("it gave a score that is no number")
        return found

    def _failure(self, why: str) -> SluiceError:
        return SluiceError(ErrorCode.UNAVAILABLE, f"reranker '{self.name}': {why}")


class PairTokenizer:
    """Tokenizes pairs of question and passage, with the special tokens and token types of the tokenizer's file."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int | None = None) -> None:
        """Take over `tokenizer`, with its padding, and its truncation unless `max_tokens` limits a pair."""
        self._tokenizer = tokenizer
        limit, padding = self._tokenizer.truncation, self._tokenizer.padding
        self._pad_id = padding["pad_id"] if padding else 0
        self._tokenizer.no_padding()
        # Cuts the longer text of a pair: the passage, unless the question is a whole page.
        most = max_tokens or (limit["max_length"] if limit else _MAX_TOKENS)
        self._tokenizer.enable_truncation(most, strategy="longest_first")

    @classmethod
    def load(cls, path: Path) -> "PairTokenizer":
        """Load `path`, a tokenizer.json or its folder. Raises SluiceError UNAVAILABLE if it cannot be read."""
        path = path / FILENAME if path.is_dir() else path
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises no narrower type
            message = f"cannot load the reranker's tokenizer {path}: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, param="reranker_tokenizer") from error

    async def encode(self, question: str, passages: Sequence[str]) -> list[tokenizers.Encoding]:
        """Tokenize the question with each passage, in a thread. Only their first 100,000 characters are looked at."""
        pairs = [(question[:_MAX_CHARS], passage[:_MAX_CHARS]) for passage in passages]
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


class EncoderReranker:
    """Scores passages by the cosine of their vectors with the question's. What the encoder does not take is cut."""

    def __init__(self, encoder: TextEncoder | LlmEncoder) -> None:
        self._encoder = encoder

    async def score(self, question: str, passages: Sequence[str]) -> PassageScores:
        """Return the scores of one passage or more. Raises as `TextEncoder.embed`."""
        encode = partial(self._encoder.embed, label="documents[{}]".format, truncate_to=TO_THE_MODEL)
        asked = await encode([question], prefix=QUERY_PREFIX)
        found = await encode(passages, prefix=DOCUMENT_PREFIX)
        cosines = found.vectors @ asked.vectors[0]
        return PassageScores(cosines.tolist(), asked.num_tokens + found.num_tokens)


class LlmReranker:
    """Scores passages with the cross-encoder `text`, whose engine batches the pairs. Longer ones are cut."""

    def __init__(self, text: LlmText, tokenizer: PairTokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer

    async def score(self, question: str, passages: Sequence[str]) -> PassageScores:
        """Return the scores of one passage or more. Raises the engine's refusals and failures."""
        rows = await self._tokenizer.encode(question, passages)
        slots = asyncio.Semaphore(self._text.info.max_num_seqs)

        async def score(row: tokenizers.Encoding) -> float:
            second = row.type_ids.index(1) if 1 in row.type_ids else 0
            async with slots:
                return float((await self._text.hidden_states(row.ids, second_text_start=second))[0, 0])

        return PassageScores(await gather_all([score(row) for row in rows]), sum(len(row.ids) for row in rows))


class RerankerFinder:
    """Finds the models of a repository that rerank by themselves: those that take `query` and `documents`, and
    cross-encoders, which give one number for a row of tokens and name their tokenizer in `tokenizer_model`, or are
    served by an engine that scores."""

    def __init__(self, models: ModelLookup) -> None:
        self._models = models
        self._tokenizers: WeakKeyDictionary[TextTokenizer | LlmText, PairTokenizer] = WeakKeyDictionary()

    def is_reranker(self, model: Model) -> bool:
        return scorer_of(model) is not None or _takes_texts(model) or self._pair_source(model) is not None

    async def find(self, model: Model) -> ModelReranker | LlmReranker:
        """Return the reranker of a model for which `is_reranker` holds. Raises UNIMPLEMENTED for a tokenizer that takes
        no pairs."""
        text = scorer_of(model)
        if text is not None:
            if text not in self._tokenizers:
                self._tokenizers[text] = await asyncio.to_thread(_pair_tokenizer, text)
            return LlmReranker(text, self._tokenizers[text])
        source = self._pair_source(model)
        if source is None:
            return ModelReranker(self._models, model.name)
        if source not in self._tokenizers:
            self._tokenizers[source] = PairTokenizer(await asyncio.to_thread(source.copy))
        return ModelReranker(self._models, model.name, self._tokenizers[source])

    def _pair_source(self, model: Model) -> TextTokenizer | None:
        """Return the tokenizer of a cross-encoder; None for another model."""
        inputs, outputs = model.spec.inputs, list(model.spec.outputs.values())
        if INPUT_IDS not in inputs or not inputs.keys() <= TOKEN_INPUTS or [each.dims for each in outputs] != [(1,)]:
            return None
        try:
            found = find_tokenizer(model, self._models)
        except SluiceError:
            return None
        return None if found is None else found.tokenizer


def _pair_tokenizer(text: LlmText) -> PairTokenizer:
    source = text.tokenizer.library_tokenizer
    if not isinstance(source, tokenizers.Tokenizer):
        message = f"model '{text.name}' has no tokenizer.json, which pairs of texts need"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    return PairTokenizer(copy.deepcopy(source), text.max_model_len - 1)


def _takes_texts(model: Model) -> bool:
    inputs = model.spec.inputs
    is_texts = inputs.keys() == {QUERY, DOCUMENTS} and all(each.data_type is BYTES for each in inputs.values())
    return is_texts and SCORES in model.spec.outputs


async def _score_texts(model: Model, question: str, passages: Sequence[str]) -> list[float]:
    inputs = {
        name: build_text_tensor(name, [[text.encode() for text in texts]], is_batched=model.spec.max_batch_size > 0)
        for name, texts in ((QUERY, [question]), (DOCUMENTS, passages))
    }
    return await _infer_numbers(model, SCORES, inputs)


async def _score_tokens(
    model: Model, tokenizer: PairTokenizer, question: str, passages: Sequence[str]
) -> PassageScores:
    """Score pairs of question and passage, as many in one request as the model takes."""
    rows = await tokenizer.encode(question, passages)
    size = model.spec.max_batch_size or len(rows)
    scores: list[float] = []
    for start in range(0, len(rows), size):
        columns = tokenizer.build_inputs(rows[start : start + size])
        declared = {name: each for name, each in model.spec.inputs.items() if name in columns}
        inputs = {name: Tensor.of(name, columns[name].astype(each.data_type.dtype)) for name, each in declared.items()}
        scores += await _infer_numbers(model, next(iter(model.spec.outputs)), inputs)
    return PassageScores(scores, sum(len(row.ids) for row in rows))


async def _infer_numbers(model: Model, name: str, inputs: dict[str, Tensor]) -> list[float]:
    """Run the model and return the elements of its output `name`, flattened."""
    response = await infer_one(model, InferRequest(inputs, requested_outputs=(name,)))
    array: Array = response.outputs[0].array
    if array.dtype.kind not in "fiu":
        raise invalid(name, f"its output '{name}' is of type {response.outputs[0].datatype}, not numbers")
    return array.astype(np.float64).ravel().tolist()
