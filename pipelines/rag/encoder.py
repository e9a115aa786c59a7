"""Texts to vectors, by any model of the repository."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.rag.encoding.estimate import estimated_starts
from pipelines.rag.encoding.faces import Face, face_of, tokenizer_of
from pipelines.rag.encoding.output import vector_output, vectors_of
from pipelines.rag.types import Vector, Vectors
from serving.backend import ModelLookup
from serving.model import Model, infer_one
from serving.request import InferRequest
from serving.spec import TensorSpec
from sluice.errors import ErrorCode, SluiceError

_NUM_PARALLEL = 2
"""Requests of one call at once: one is being gathered while another runs. Models that do not batch get more."""
_NUM_PARALLEL_ROWS = 16
_MAX_REQUEST_CHARS = 4_000
"""About 1,000 tokens, 0.1 s of a processor core for the bundled encoder: longer batches are no faster, and a question
may have to wait for one."""
_DOCUMENT_PRIORITY = 2
"""Behind questions, where the model has priority levels."""
_PROBE = "word"
_QUERY_PREFIX, _DOCUMENT_PREFIX = "query_prefix", "document_prefix"


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The model as it is now."""

    model: Model
    face: Face
    output: TensorSpec

    def prefix(self, parameter: str) -> str:
        parameters = self.model.config.parameters
        return str(parameters[parameter].string_value) if parameter in parameters else ""

    async def vectors(self, texts: Sequence[str], priority: int = 0) -> Vectors:
        """[len(texts), dim], for at most as many texts as the model takes at once."""
        rows = await self.face.rows(texts)
        request = InferRequest(rows.inputs, requested_outputs=(self.output.name,), priority=priority, protocol="rag")
        vectors = vectors_of(await infer_one(self.model, request), self.model.spec, self.output, rows.mask)
        if len(vectors) != len(texts):
            message = f"model '{self.model.name}' gave {len(vectors)} vectors for {len(texts)} texts"
            raise SluiceError(ErrorCode.INTERNAL, message)
        return vectors


class TextEncoder:
    """A repository model that makes vectors of texts. Looks its model up for each call, so that a reload is seen.

    Its parameters `query_prefix` and `document_prefix` are put before texts, `tokenizer_model` names whose tokens it
    counts in (docs/rag.md).
    """

    def __init__(self, models: ModelLookup, name: str) -> None:
        self.name = name
        self._models = models

    async def dim(self) -> int:
        """The length of its vectors. Raises as `encode_documents`."""
        encoder = self._encoder()
        declared = encoder.output.dims[-1]
        if declared > 0:
            return declared
        return int((await self._asked(encoder, [_PROBE])).shape[1])

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        """[len(texts), dim] float32, each of length 1, with the model's prefix for documents.

        Raises SluiceError UNAVAILABLE, which names the model, where it does not serve, INVALID where it is no encoder.
        """
        if not texts:
            return np.zeros((0, await self.dim()), np.float32)
        encoder = self._encoder()
        prefix = encoder.prefix(_DOCUMENT_PREFIX)
        return await self._encoded(encoder, [_sound(prefix + text) for text in texts])

    async def encode_query(self, text: str) -> Vector:
        """[dim] float32 of length 1, with the model's prefix for queries."""
        encoder = self._encoder()
        vector: Vector = (await self._asked(encoder, [_sound(encoder.prefix(_QUERY_PREFIX) + text)]))[0]
        return vector

    async def token_starts(self, text: str) -> list[int]:
        """Where each of the model's tokens begins in `text`, in characters: what chunks are measured by.

        Estimated where the server has no tokenizer for the model.
        """
        model = self._model()
        try:
            tokenizer = tokenizer_of(model, self._models)
        except SluiceError as error:
            raise self._named(error) from error
        starts = estimated_starts if tokenizer is None else tokenizer.tokenizer.starts
        return await asyncio.to_thread(lambda: starts(_sound(text)))

    def _model(self) -> Model:
        try:
            return self._models.find(self.name)
        except SluiceError as error:
            raise SluiceError(
                ErrorCode.UNAVAILABLE, f"the encoder '{self.name}' does not serve: {error.message}"
            ) from error

    def _encoder(self) -> _Encoder:
        model = self._model()
        try:
            return _Encoder(model, face_of(model, self._models), vector_output(model.spec))
        except SluiceError as error:
            raise self._named(error) from error

    async def _encoded(self, encoder: _Encoder, texts: Sequence[str]) -> Vectors:
        """Texts of like length together, few requests at once. The first that fails ends the others."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        groups = _groups(texts, order, encoder.face.max_rows)
        parts: list[tuple[list[int], Vectors]] = []

        async def work() -> None:
            for group in groups:
                parts.append((group, await self._asked(encoder, [texts[i] for i in group], _DOCUMENT_PRIORITY)))

        num_workers = max(_NUM_PARALLEL, _NUM_PARALLEL_ROWS // encoder.face.max_rows)
        workers = [asyncio.create_task(work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return _in_order(parts)

    async def _asked(self, encoder: _Encoder, texts: Sequence[str], priority: int = 0) -> Vectors:
        try:
            return await encoder.vectors(texts, priority)
        except SluiceError as error:
            raise self._named(error) from error

    def _named(self, error: SluiceError) -> SluiceError:
        code = ErrorCode.UNAVAILABLE if error.code is ErrorCode.NOT_FOUND else error.code
        message = f"encoder '{self.name}': {error.message}"
        return SluiceError(code, message, param=error.param, retry_after_s=error.retry_after_s)


def _sound(text: str) -> str:
    """With question marks for halves of surrogate pairs, which some PDFs hold and no tokenizer takes. As long."""
    return text.encode(errors="replace").decode()


def _in_order(parts: Sequence[tuple[Sequence[int], Vectors]]) -> Vectors:
    """Each group's vectors at its indices."""
    joined = np.concatenate([vectors for _, vectors in parts])
    vectors = np.empty_like(joined)
    vectors[[index for group, _ in parts for index in group]] = joined
    return vectors


def _groups(texts: Sequence[str], order: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """The indices of `order` in requests that no model and no waiting question is hurt by."""
    group: list[int] = []
    num_chars = 0
    for index in order:
        if group and (len(group) == max_rows or num_chars + len(texts[index]) > _MAX_REQUEST_CHARS):
            yield group
            group, num_chars = [], 0
        group.append(index)
        num_chars += len(texts[index])
    yield group
