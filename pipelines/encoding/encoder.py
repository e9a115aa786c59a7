"""Encodes texts as vectors with a model of the repository."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import AdmitTokens, Vector, Vectors, admit_all
from sluice.pipelines.encoding.signature import (
    EncoderInputs,
    Inputs,
    choose_inputs,
    find_tokenizer,
    find_vector_output,
    normalize,
    read_vectors,
)
from sluice.pipelines.stages.tokenizer_model import TextTokenizer, TokenizerModel, check_token_ids, cut_token_ids
from sluice.serving.backend import ModelLookup
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.spec import TensorSpec

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
MATRYOSHKA_DIMENSIONS = "matryoshka_dimensions"
"""Parameter of a model whose vectors may be cut: the lengths that they may have, or "any"."""
QUERY_PREFIX, DOCUMENT_PREFIX = "query_prefix", "document_prefix"
TO_THE_MODEL = -1
"""As many tokens as a model takes."""
_CHARS_PER_TOKEN = 4
_MAX_TOKENIZED_CHARS = 50_000
"""Characters that are tokenized on a thread at once: a caller that leaves waits for no more."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors [texts, dim], and how many tokens were encoded: 0 where the server has no tokenizer for the model. Those
    that a cache had were encoded before (`is_cached`)."""

    vectors: Vectors
    num_tokens: int
    is_cached: bool = False


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The currently loaded version of an encoder model with its I/O signature."""

    model: Model
    inputs: EncoderInputs
    output: TensorSpec

    def parameter(self, name: str) -> str:
        parameters = self.model.config.parameters
        return str(parameters[name].string_value) if name in parameters else ""

    def check_dimensions(self, wanted: int | None) -> None:
        """Raise INVALID unless the model's vectors may be cut to so many elements."""
        full, allowed = self.output.dims[-1], self.parameter(MATRYOSHKA_DIMENSIONS)
        if wanted in (None, full):
            return
        if not allowed:
            whole = f"the model's {full}" if full > 0 else "absent"
            reason = f"its vectors are not made to be cut (parameter '{MATRYOSHKA_DIMENSIONS}')"
            raise invalid("dimensions", f"dimensions must be {whole} for '{self.model.name}', got {wanted}: {reason}")
        if allowed != "any" and str(wanted) not in re.findall(r"\d+", allowed):
            raise invalid("dimensions", f"dimensions must be among {allowed} for '{self.model.name}', got {wanted}")

    async def encode(self, texts: Inputs, priority: int = 0) -> Vectors:
        """Encode at most `inputs.max_rows` texts, or their token ids, as [len(texts), dim] in one request."""
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

    @property
    def created(self) -> int:
        """When the model was loaded, in seconds since 1970. Raises UNAVAILABLE if it does not serve."""
        return self._model().created

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a text; None where that is not known. Raises as `encode_documents` does."""
        tokenizer = self.tokenizer()
        return (tokenizer.tokenizer.max_tokens or None) if tokenizer is not None else None

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
        prefix = encoder.parameter(DOCUMENT_PREFIX)
        return await self._encode_batches(encoder, [replace_surrogates(prefix + text) for text in texts])

    async def encode_query(self, text: str) -> Vector:
        """Return [dim] float32 of length 1, of the text with the model's query prefix. Raises as `encode_documents`."""
        encoder = self._encoder()
        vectors = await self._encode(encoder, [replace_surrogates(encoder.parameter(QUERY_PREFIX) + text)])
        vector: Vector = vectors[0]
        return vector

    async def embed(
        self,
        inputs: Inputs,
        label: Callable[[int], str],
        *,
        prefix: str = "",
        truncate_to: int | None = None,
        dimensions: int | None = None,
        admit: AdmitTokens = admit_all,
    ) -> Embeddings:
        """Encode texts, with the prefix that the model's parameter `prefix` holds, or token ids as they are. Vectors of
        fewer `dimensions` are the beginnings of the model's, of length 1. `admit` is asked before anything is encoded.

        Raises as `prepare_inputs`; INVALID for dimensions that the model's vectors cannot have; else as
        `encode_documents` does.
        """
        encoder, tokenizer = self._encoder(), self.tokenizer()
        encoder.check_dimensions(dimensions)
        before = encoder.parameter(prefix) if prefix else ""
        takes_ids = encoder.inputs.takes_ids
        rows, num_tokens = await prepare_inputs(tokenizer, inputs, label, takes_ids, before, truncate_to)
        await admit(num_tokens)
        vectors = await self._encode_batches(encoder, rows, 0 if len(rows) == 1 else _DOCUMENT_PRIORITY)
        return Embeddings(cut_vectors(vectors, dimensions), num_tokens)

    def tokenizer(self) -> TokenizerModel | None:
        """Return the model's tokenizer; None where the server does not have it. Raises as `encode_documents` does."""
        model = self._model()
        try:
            return find_tokenizer(model, self._models)
        except SluiceError as error:
            raise self._name_model(error) from error

    async def token_starts(self, text: str) -> Sequence[int]:
        """Return the character offset at which each of the model's tokens begins in `text`, ascending.

        The offsets are estimated if the server has no tokenizer for the model.
        """
        tokenizer = self.tokenizer()
        starts = estimate_token_starts if tokenizer is None else tokenizer.tokenizer.starts
        return await asyncio.to_thread(lambda: starts(replace_surrogates(text)))

    def models_used(self) -> list[Model]:
        """Return the models that make the vectors: its own, its tokenizer and all steps. Raises as
        `encode_documents`."""
        tokenizer = self.tokenizer()
        found = [self._model()] if tokenizer is None else [self._model(), tokenizer]
        for model in found:  # which grows
            found += [self._models.find(each.model_name, -1) for each in model.config.ensemble_scheduling.step]
        return found

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

    async def _encode_batches(self, encoder: _Encoder, texts: Inputs, priority: int = _DOCUMENT_PRIORITY) -> Vectors:
        """Encode texts in batches of similar length, a few requests at a time. The first failure cancels the others."""
        batches = split_batches(texts, encoder.inputs.max_rows)
        parts: list[tuple[list[int], Vectors]] = []

        async def work() -> None:
            for batch in batches:
                rows = cast(Inputs, [texts[i] for i in batch])
                parts.append((batch, await self._encode(encoder, rows, priority)))

        num_workers = max(_NUM_PARALLEL, _NUM_PARALLEL_ROWS // encoder.inputs.max_rows)
        workers = [asyncio.create_task(work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return _restore_order(parts)

    async def _encode(self, encoder: _Encoder, texts: Inputs, priority: int = 0) -> Vectors:
        try:
            return await encoder.encode(texts, priority)
        except SluiceError as error:
            raise self._name_model(error) from error

    def _name_model(self, error: SluiceError) -> SluiceError:
        code = ErrorCode.UNAVAILABLE if error.code is ErrorCode.NOT_FOUND else error.code
        message = f"encoder '{self.name}': {error.message}"
        return SluiceError(code, message, param=error.param, retry_after_s=error.retry_after_s)


def is_encoder(model: Model, models: ModelLookup) -> bool:
    """Whether a TextEncoder can use the model now. A single number, as rerankers give it, is no vector,
    and neither are the scores of classes, which have labels."""
    try:
        choose_inputs(model, models)
        output = find_vector_output(model.spec)
        return output.dims != (1,) and not model.labels.get(output.name)
    except SluiceError:
        return False


def cut_vectors(vectors: Vectors, dimensions: int | None) -> Vectors:
    """Return the beginnings of the vectors, of length 1. Raises INVALID for more elements than they have."""
    size = vectors.shape[1]
    if dimensions is None or dimensions == size:
        return vectors
    if dimensions > size:
        raise invalid("dimensions", f"dimensions must be at most {size}, the model's, got {dimensions}")
    return normalize(vectors[:, :dimensions])


async def prepare_inputs(
    tokenizer: TokenizerModel | None,
    inputs: Inputs,
    label: Callable[[int], str],
    takes_ids: bool,
    before: str = "",
    truncate_to: int | None = None,
) -> tuple[Inputs, int]:
    """Return what a model gets of texts, with `before` in front of each, or of token ids, and how many tokens that is
    in all: 0 without a tokenizer. It gets token ids if it `takes_ids`, else texts. Longer inputs are cut to
    `truncate_to` tokens, of which TO_THE_MODEL is as many as the tokenizer allows.

    Raises INVALID, which calls the input i `label(i)`, for token ids that the vocabulary lacks or that are those of no
    text, and for an input of more tokens than the tokenizer allows unless `truncate_to` is given.
    """
    if tokenizer is None:
        if not isinstance(inputs[0], str) or truncate_to not in (None, TO_THE_MODEL):
            reason = "the server does not have the model's tokenizer"
            raise invalid(label(0), f"{label(0)} must be a text of any length, sent as it is: {reason}")
        return [replace_surrogates(before + text) for text in cast(Sequence[str], inputs)], 0
    own = tokenizer.tokenizer
    most = _choose_limit(own, truncate_to)
    # A tokenizer step of a model that takes texts puts its prefix before the text by itself.
    prefix = "" if takes_ids else tokenizer.prefix
    if isinstance(inputs[0], str):
        texts = [replace_surrogates(before + text) for text in cast(Sequence[str], inputs)]
        token_ids = await _tokenize(own, [prefix + text for text in texts], label, truncates=truncate_to is not None)
        if most is None or all(len(each) <= most for each in token_ids):
            return token_ids if takes_ids else texts, sum(map(len, token_ids))
        [special] = await asyncio.to_thread(own.encode_long, [""])
        token_ids = [cut_token_ids(each, special, most) for each in token_ids]
    else:
        token_ids = await _check_ids(own, cast(Sequence[list[int]], inputs), label, most, truncate_to is not None)
    num_tokens = sum(map(len, token_ids))
    return token_ids if takes_ids else await _as_texts(own, token_ids, label, prefix), num_tokens


def _choose_limit(tokenizer: TextTokenizer, truncate_to: int | None) -> int | None:
    """Return the most tokens of an input; None for no limit."""
    if truncate_to is None or truncate_to == TO_THE_MODEL:
        return tokenizer.max_tokens or None
    if tokenizer.max_tokens and truncate_to > tokenizer.max_tokens:
        message = f"truncate_prompt_tokens must be at most {tokenizer.max_tokens}, what the model takes"
        raise invalid("truncate_prompt_tokens", f"{message}, got {truncate_to}")
    return truncate_to


async def _as_texts(
    tokenizer: TextTokenizer, rows: Sequence[list[int]], label: Callable[[int], str], prefix: str
) -> list[str]:
    """Return the texts that have these token ids, with or without special ones. Raises INVALID where there is none."""

    def decode() -> list[str]:
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
        for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
            found = [tokenizer.encode_whole(text, add_special_tokens=adds) for adds in (True, False)]
            if row not in found or not text.startswith(prefix):
                reason = "the model takes text, and no text has just these token ids of its tokenizer"
                raise invalid(label(index), f"{label(index)} must be a text: {reason}")
        return [text.removeprefix(prefix) for text in texts]

    return await asyncio.to_thread(decode)


async def _tokenize(
    tokenizer: TextTokenizer, texts: Sequence[str], label: Callable[[int], str], *, truncates: bool
) -> list[list[int]]:
    """Return the token ids of texts, which are tokenized in groups on a thread. Raises as `prepare_inputs`."""
    found: list[list[int]] = []
    while len(found) < len(texts):
        end, num_chars = len(found), 0
        while end < len(texts) and num_chars < _MAX_TOKENIZED_CHARS:
            num_chars += len(texts[end])
            end += 1
        for token_ids, is_truncated in await asyncio.to_thread(tokenizer.encode_checked, texts[len(found) : end]):
            if is_truncated and not truncates:
                raise too_long(label(len(found)), tokenizer.max_tokens)
            found.append(token_ids)
    return found


async def _check_ids(
    tokenizer: TextTokenizer,
    inputs: Sequence[list[int]],
    label: Callable[[int], str],
    most: int | None,
    truncates: bool,
) -> list[list[int]]:
    """Return the token ids that the model takes of `inputs`. Raises as `prepare_inputs`."""
    for index, token_ids in enumerate(inputs):
        if most is not None and len(token_ids) > most and not truncates:
            raise too_long(label(index), most)
    rows = [token_ids[:most] for token_ids in inputs]

    def check() -> None:
        for index, token_ids in enumerate(rows):
            check_token_ids(token_ids, tokenizer.num_tokens, label(index))

    await asyncio.to_thread(check)
    return rows


def too_long(label: str, max_tokens: int) -> SluiceError:
    """Return the error about an input, called `label`, of more tokens than a model takes."""
    remedy = "shorten it, or send truncate_prompt_tokens: -1"
    return invalid(label, f"{label} has more tokens than the {max_tokens} that the model takes; {remedy}")


def estimate_token_starts(text: str) -> list[int]:
    """Return roughly where tokens begin, for encoders whose tokenizer the server does not have. Blocks on long texts.

    The offsets are in characters, ascending.
    """
    return [match.start() for match in _TOKEN_LIKE.finditer(text)]


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which some PDFs contain and no tokenizer accepts, by question marks. Keeps offsets."""
    return text.encode(errors="replace").decode()


def split_batches(texts: Inputs, max_rows: int) -> Iterator[list[int]]:
    """Yield the indices of `texts`, shortest text first, in batches within `max_rows` and _MAX_REQUEST_CHARS."""
    sizes = [len(text) if isinstance(text, str) else _CHARS_PER_TOKEN * len(text) for text in texts]
    batch: list[int] = []
    num_chars = 0
    for index in sorted(range(len(texts)), key=sizes.__getitem__):
        if batch and (len(batch) == max_rows or num_chars + sizes[index] > _MAX_REQUEST_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(index)
        num_chars += sizes[index]
    yield batch


def _restore_order(parts: Sequence[tuple[Sequence[int], Vectors]]) -> Vectors:
    """Join the batches' vectors in the order of their texts."""
    joined = np.concatenate([vectors for _, vectors in parts])
    vectors = np.empty_like(joined)
    vectors[[index for batch, _ in parts for index in batch]] = joined
    return vectors
