"""Encodes texts as vectors with a model of the repository."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.rag.encoder_signature import (
    EncoderInputs,
    choose_inputs,
    find_tokenizer,
    find_vector_output,
    read_vectors,
)
from pipelines.rag.types import Vector, Vectors
from serving.backend import ModelLookup
from serving.model import Model, infer_one
from serving.request import InferRequest
from serving.spec import TensorSpec
from sluice.errors import ErrorCode, SluiceError

_NUM_PARALLEL = 2
"""Concurrent requests of one call: one gathers its batch while another runs. Models that do not batch get more."""
_NUM_PARALLEL_ROWS = 16
_MAX_REQUEST_CHARS = 600
"""About one chunk of 160 tokens. Larger batches leave a core's cache: a chunk in a batch of eight takes 1.7 times as
long as alone, and questions wait for the whole batch."""
_DOCUMENT_PRIORITY = 2
"""Priority level behind that of questions, for models that have priority levels."""
_PROBE_TEXT = "word"
_TOKEN_LIKE = re.compile(r"[^\W\d_]{1,5}|\d{1,3}|[^\w\s]|_", re.UNICODE)
"""Matches at most five letters, three digits or one sign. English has about 4.5 letters a token, so this counts
slightly too many: chunks come out rather too short than cut off by the encoder."""
_QUERY_PREFIX, _DOCUMENT_PREFIX = "query_prefix", "document_prefix"


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The currently loaded version of an encoder model with its I/O signature."""

    model: Model
    inputs: EncoderInputs
    output: TensorSpec

    def prefix(self, parameter: str) -> str:
        parameters = self.model.config.parameters
        return str(parameters[parameter].string_value) if parameter in parameters else ""

    async def encode(self, texts: Sequence[str], priority: int = 0) -> Vectors:
        """Encode at most `inputs.max_rows` texts as [len(texts), dim] in one request."""
        batch = await self.inputs.build_batch(texts)
        request = InferRequest(batch.inputs, requested_outputs=(self.output.name,), priority=priority, protocol="rag")
        vectors = read_vectors(await infer_one(self.model, request), self.model.spec, self.output, batch.mask)
        if len(vectors) != len(texts):
            message = f"model '{self.model.name}' gave {len(vectors)} vectors for {len(texts)} texts"
            raise SluiceError(ErrorCode.INTERNAL, message)
        return vectors


class TextEncoder:
    """Encodes texts with the repository model `name`, which it looks up on every call so that a reload takes effect.

    The model's parameters `query_prefix` and `document_prefix` are prepended to texts; `tokenizer_model` names the
    tokenizer that counts its tokens (docs/rag.md).
    """

    def __init__(self, models: ModelLookup, name: str) -> None:
        self.name = name
        self._models = models

    async def dim(self) -> int:
        """Return the length of the model's vectors. Raises as `encode_documents` does."""
        encoder = self._encoder()
        declared = encoder.output.dims[-1]
        if declared > 0:
            return declared
        return int((await self._encode(encoder, [_PROBE_TEXT])).shape[1])

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        """Return [len(texts), dim] float32, each row of length 1, of the texts with the model's document prefix.

        Raises SluiceError UNAVAILABLE, which names the model, if it does not serve, and INVALID if it is no encoder.
        """
        if not texts:
            return np.zeros((0, await self.dim()), np.float32)
        encoder = self._encoder()
        prefix = encoder.prefix(_DOCUMENT_PREFIX)
        return await self._encode_batches(encoder, [_replace_surrogates(prefix + text) for text in texts])

    async def encode_query(self, text: str) -> Vector:
        """Return [dim] float32 of length 1, of the text with the model's query prefix. Raises as `encode_documents`."""
        encoder = self._encoder()
        vectors = await self._encode(encoder, [_replace_surrogates(encoder.prefix(_QUERY_PREFIX) + text)])
        vector: Vector = vectors[0]
        return vector

    async def token_starts(self, text: str) -> Sequence[int]:
        """Return the character offset at which each of the model's tokens begins in `text`, ascending.

        The offsets are estimated if the server has no tokenizer for the model.
        """
        model = self._model()
        try:
            tokenizer = find_tokenizer(model, self._models)
        except SluiceError as error:
            raise self._name_model(error) from error
        starts = estimate_token_starts if tokenizer is None else tokenizer.tokenizer.starts
        return await asyncio.to_thread(lambda: starts(_replace_surrogates(text)))

    def _model(self) -> Model:
        try:
            return self._models.find(self.name)
        except SluiceError as error:
            message = f"the encoder '{self.name}' does not serve: {error.message}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error

    def _encoder(self) -> _Encoder:
        model = self._model()
        try:
            return _Encoder(model, choose_inputs(model, self._models), find_vector_output(model.spec))
        except SluiceError as error:
            raise self._name_model(error) from error

    async def _encode_batches(self, encoder: _Encoder, texts: Sequence[str]) -> Vectors:
        """Encode texts in batches of similar length, a few requests at a time. The first failure cancels the others."""
        batches = _split_batches(texts, encoder.inputs.max_rows)
        parts: list[tuple[list[int], Vectors]] = []

        async def work() -> None:
            for batch in batches:
                parts.append((batch, await self._encode(encoder, [texts[i] for i in batch], _DOCUMENT_PRIORITY)))

        num_workers = max(_NUM_PARALLEL, _NUM_PARALLEL_ROWS // encoder.inputs.max_rows)
        workers = [asyncio.create_task(work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return _restore_order(parts)

    async def _encode(self, encoder: _Encoder, texts: Sequence[str], priority: int = 0) -> Vectors:
        try:
            return await encoder.encode(texts, priority)
        except SluiceError as error:
            raise self._name_model(error) from error

    def _name_model(self, error: SluiceError) -> SluiceError:
        code = ErrorCode.UNAVAILABLE if error.code is ErrorCode.NOT_FOUND else error.code
        message = f"encoder '{self.name}': {error.message}"
        return SluiceError(code, message, param=error.param, retry_after_s=error.retry_after_s)


def estimate_token_starts(text: str) -> list[int]:
    """Return roughly where tokens begin, for encoders whose tokenizer the server does not have. Blocks on long texts.

    The offsets are in characters, ascending.
    """
    return [match.start() for match in _TOKEN_LIKE.finditer(text)]


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which some PDFs contain and no tokenizer accepts, by question marks. Keeps offsets."""
    return text.encode(errors="replace").decode()


def _split_batches(texts: Sequence[str], max_rows: int) -> Iterator[list[int]]:
    """Yield the indices of `texts`, shortest text first, in batches within `max_rows` and _MAX_REQUEST_CHARS."""
    batch: list[int] = []
    num_chars = 0
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        if batch and (len(batch) == max_rows or num_chars + len(texts[index]) > _MAX_REQUEST_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(index)
        num_chars += len(texts[index])
    yield batch


def _restore_order(parts: Sequence[tuple[Sequence[int], Vectors]]) -> Vectors:
    """Join the batches' vectors in the order of their texts."""
    joined = np.concatenate([vectors for _, vectors in parts])
    vectors = np.empty_like(joined)
    vectors[[index for batch, _ in parts for index in batch]] = joined
    return vectors
