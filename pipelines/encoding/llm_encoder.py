"""Encodes texts as vectors with a language model whose engine embeds."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import numpy as np

from sluice.errors import SluiceError, invalid
from sluice.pipelines.encoding import AdmitTokens, Vector, Vectors, admit_all
from sluice.pipelines.encoding.encoder import (
    DOCUMENT_PREFIX,
    QUERY_PREFIX,
    TO_THE_MODEL,
    Embeddings,
    TextEncoder,
    cut_vectors,
    estimate_token_starts,
    replace_surrogates,
    too_long,
)
from sluice.pipelines.encoding.signature import Inputs, normalize
from sluice.pipelines.llm.model import embedder_of
from sluice.pipelines.llm.pooling import PoolingMode
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.stages.tokenizer_model import check_token_ids, cut_token_ids
from sluice.serving.backend import ModelLookup
from sluice.serving.task_model import gather_all

_PROMPTS = {QUERY_PREFIX: ("query",), DOCUMENT_PREFIX: ("document", "passage")}
"""The names of sentence-transformers' prompts for each prefix."""
_CHARS_PER_TOKEN = 64
"""Characters of a text that is truncated which are tokenized for each token that is kept."""


class LlmEncoder:
    """Encodes texts with the language model `text`, in the way its checkpoint's files of sentence-transformers say."""

    def __init__(self, text: LlmText) -> None:
        self.text = text
        self.name = text.name
        self.created = text.created
        self._settings = text.embedding_settings

    @property
    def max_model_len(self) -> int:
        """Most tokens of a text."""
        longest = self.text.max_model_len - 1  # the engine's own last token
        return min(longest, self._settings.max_tokens or longest)

    async def dim(self) -> int:
        """Return the length of the model's vectors."""
        return self.text.info.embedding_size

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        """Return [len(texts), dim] float32, each row of length 1, of the texts as documents. Raises as `embed`."""
        if not texts:
            return np.zeros((0, await self.dim()), np.float32)
        found = await self.embed(texts, self._label, prefix=DOCUMENT_PREFIX, truncate_to=TO_THE_MODEL)
        return normalize(found.vectors)

    async def encode_query(self, text: str) -> Vector:
        """Return [dim] float32 of length 1, of the text as a question. Raises as `embed`."""
        found = await self.embed([text], self._label, prefix=QUERY_PREFIX, truncate_to=TO_THE_MODEL)
        vector: Vector = normalize(found.vectors[0])
        return vector

    async def token_starts(self, text: str) -> Sequence[int]:
        """Return roughly where tokens begin in `text`, in characters: chunks are far shorter than what a language model
        takes."""
        return await asyncio.to_thread(estimate_token_starts, text)

    def _label(self, index: int) -> str:
        return f"a text for the encoder '{self.name}'"

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
        """Encode and raise as `TextEncoder.embed`, with the prompt of sentence-transformers for `prefix`. The engine
        batches the inputs."""
        self._check_dimensions(dimensions)
        if isinstance(inputs[0], str):
            prompts = self._settings.prompts
            before = next((prompts[name] for name in _PROMPTS.get(prefix, ()) if name in prompts), "")
            texts = [replace_surrogates(before + text) for text in cast(Sequence[str], inputs)]
            rows = [await self._tokenize(text, label(index), truncate_to) for index, text in enumerate(texts)]
        else:
            most = None if truncate_to is None else self._limit(truncate_to)
            rows = [ids[:most] for ids in cast(Sequence[list[int]], inputs)]
            await asyncio.to_thread(self._check_ids, rows, label)
        num_tokens = sum(map(len, rows))
        await admit(num_tokens)
        slots = asyncio.Semaphore(self.text.info.max_num_seqs)

        async def encode(token_ids: list[int]) -> Vector:
            async with slots:
                return await self._encode(token_ids)

        vectors = np.stack(await gather_all([encode(each) for each in rows]))
        return Embeddings(cut_vectors(vectors, dimensions), num_tokens)

    async def _encode(self, token_ids: list[int]) -> Vector:
        mode = self._settings.mode
        is_pooled = self.text.info.is_pooled
        hidden = await self.text.hidden_states(token_ids, whole=mode is not PoolingMode.LAST and not is_pooled)
        vector: Vector = mode.pool(hidden)
        return normalize(vector) if self._settings.normalizes else vector

    async def _tokenize(self, text: str, label: str, truncate_to: int | None) -> list[int]:
        tokenizer, most = self.text.tokenizer, self._limit(truncate_to)
        if truncate_to is not None:
            text = text[: most * _CHARS_PER_TOKEN]
        await asyncio.sleep(0)  # short texts are tokenized on this loop, up to 2,048 of a request
        token_ids = await tokenizer.encode_text(text, self.text.max_model_len if truncate_to is None else None)
        if not token_ids:
            raise invalid(label, f"{label} must not be empty: it has no tokens")
        if truncate_to is None and len(token_ids) > most:
            raise too_long(label, most)
        return cut_token_ids(token_ids, await tokenizer.encode_text(""), most)

    def _limit(self, truncate_to: int | None) -> int:
        """Return the most tokens of an input. Raises INVALID for more than the model takes."""
        most = self.max_model_len
        if truncate_to is None or truncate_to == TO_THE_MODEL:
            return most
        if truncate_to > most:
            message = f"truncate_prompt_tokens must be at most {most}, what the model takes, got {truncate_to}"
            raise invalid("truncate_prompt_tokens", message)
        return truncate_to

    def _check_ids(self, rows: Sequence[list[int]], label: Callable[[int], str]) -> None:
        for index, token_ids in enumerate(rows):
            if len(token_ids) > self.max_model_len:
                raise too_long(label(index), self.max_model_len)
            check_token_ids(token_ids, self.text.info.vocab_size, label(index))

    def _check_dimensions(self, wanted: int | None) -> None:
        full, allowed = self.text.info.embedding_size, self._settings.dimensions
        if wanted in (None, full) or allowed is None or wanted in allowed:
            return
        known = ", ".join(map(str, sorted({*allowed, full})))
        raise invalid("dimensions", f"dimensions must be among {known} for '{self.name}', got {wanted}")


def find_encoder(models: ModelLookup, name: str) -> TextEncoder | LlmEncoder:
    """Return the encoder of a collection. One that does not serve says so when it is asked for vectors."""
    with suppress(SluiceError):
        text = embedder_of(models.find(name))
        if text is not None:
            return LlmEncoder(text)
    return TextEncoder(models, name)
