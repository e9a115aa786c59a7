"""The answer cache: answers that a request determines, kept for equal requests in the server's response cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from sluice.engine.client.stream import Consumer
from sluice.pipelines.answers.entries import (
    decode_event,
    decode_vectors,
    encode_event,
    encode_vectors,
    merge_events,
    text_key,
    vectors_key,
)
from sluice.pipelines.answers.identity import encoder_identity, text_identity
from sluice.pipelines.answers.notes import note_lookup
from sluice.pipelines.encoding import AdmitTokens, admit_all
from sluice.pipelines.encoding.encoder import Embeddings, TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.signature import Inputs
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.text.consumers import Mapped, give
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.sampling import SamplingDefaults, drop_random_seed
from sluice.pipelines.text.types import TextEvent, TextRequest
from sluice.serving.caching.response_cache import ResponseCache

MAX_TEXT_CHARS = 1 << 20
"""Longest text that is kept: a longer one is not even collected."""
_NO_DEFAULTS = SamplingDefaults()


@dataclass(slots=True)
class AnswerCounts:
    """What became of one model's answers that may be kept."""

    num_hits: int = 0
    num_misses: int = 0
    kept_bytes: int = 0
    """Bytes of the answers that were kept, whether or not they still are."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was found for a request to a model. `request` has its prompt encoded where that took place. `key` b"" means
    that the answer is not kept, and `event` is the whole answer where there is one."""

    model: TextModel
    request: TextRequest
    key: bytes = b""
    event: TextEvent | None = None

    def note(self) -> None:
        """Have the headers of the answer say whether it was kept, where it could be."""
        if self.key:
            note_lookup(is_hit=self.event is not None)


class Embedder(Protocol):
    """What encodes texts for clients."""

    async def embed(
        self,
        inputs: Inputs,
        label: Callable[[int], str],
        *,
        prefix: str = "",
        truncate_to: int | None = None,
        dimensions: int | None = None,
        admit: AdmitTokens = admit_all,
    ) -> Embeddings: ...


class AnswerCache:
    """Answers texts and vectors from a response cache, and keeps them there. Belongs to the event loop.

    A `scope` keeps the answers of those apart who must not learn what others asked; None is everybody's.
    """

    def __init__(self, store: ResponseCache, note_hit: Callable[[], None] = lambda: None) -> None:
        """`note_hit` is called with each answer of the cache, in the task of its request."""
        self.counts: dict[str, AnswerCounts] = {}
        """Counts by model."""
        self._store = store
        self._note_hit = note_hit

    async def look_up(self, model: TextModel, request: TextRequest, scope: str | None) -> Lookup:
        """Look for the answer to a request. Raises as `TextModel.prepare_shared`."""
        identity = text_identity(model) if is_determined(model, request) else None
        if identity is None:
            return Lookup(model, request)
        prompt = await model.prepare_shared(request.prompt, request.prompt_form)
        request = msgspec.structs.replace(request, prompt=prompt)
        key = text_key(identity, scope, request, request.tenant if scope is not None else "")
        value = await self._store.find_value(key)
        event = None if value is None else decode_event(value)
        self._count(model.name, is_hit=event is not None)
        return Lookup(model, request, key, event)

    async def generate(self, lookup: Lookup, consumer: Consumer[TextEvent]) -> None:
        """Generate the answer that was not found, and keep it. Raises as `TextModel.generate`."""
        collected: list[TextEvent] = []
        num_chars = 0

        def collect(event: TextEvent) -> TextEvent:
            nonlocal num_chars
            num_chars += len(event.text)
            if num_chars <= MAX_TEXT_CHARS:
                collected.append(event)
                if event.finish_reason is not None:  # an answer that failed has no such event
                    self._keep(lookup.model.name, lookup.key, encode_event(merge_events(collected)))
            return event

        await lookup.model.generate(lookup.request, Mapped(collect, consumer))

    async def embed(
        self,
        encoder: TextEncoder | LlmEncoder,
        scope: str | None,
        inputs: Inputs,
        label: Callable[[int], str],
        options: dict[str, Any],
        admit: AdmitTokens = admit_all,
    ) -> Embeddings:
        """Encode as `encoder` does with these options. Raises as `TextEncoder.embed`."""
        key = vectors_key(encoder_identity(encoder), scope, inputs, options)
        value = await self._store.find_value(key)
        kept = None if value is None else decode_vectors(value)
        self._count(encoder.name, is_hit=kept is not None)
        note_lookup(is_hit=kept is not None, is_only=True)
        if kept is not None:
            return replace(kept, is_cached=True)
        found = await encoder.embed(inputs, label, admit=admit, **options)
        self._keep(encoder.name, key, encode_vectors(found))
        return found

    def _count(self, model: str, *, is_hit: bool) -> None:
        counts = self.counts.setdefault(model, AnswerCounts())
        if is_hit:
            counts.num_hits += 1
            self._note_hit()
        else:
            counts.num_misses += 1

    def _keep(self, model: str, key: bytes, value: bytes) -> None:
        if self._store.keep_value(key, value):
            self.counts[model].kept_bytes += len(value)


def is_determined(model: TextModel, request: TextRequest) -> bool:
    """Whether the request determines its answer: the tokens are the likeliest ones, or a seed chooses them."""
    if request.parameters or request.returns_context_logits or request.returns_generation_logits:
        return False
    text = model.base if isinstance(model, AdapterText) else model
    defaults = text.defaults if isinstance(text, LlmText) else _NO_DEFAULTS
    sampling = {**defaults, **drop_random_seed(request.sampling)}
    return sampling.get("temperature") == 0 or sampling.get("seed") is not None


class CachedEncoder:
    """An encoder whose vectors an answer cache keeps."""

    def __init__(self, cache: AnswerCache, encoder: TextEncoder | LlmEncoder, scope: str | None) -> None:
        self._cache = cache
        self._encoder = encoder
        self._scope = scope

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
        """Encode as `TextEncoder.embed`, or answer from the cache."""
        options = {"prefix": prefix, "truncate_to": truncate_to, "dimensions": dimensions}
        return await self._cache.embed(self._encoder, self._scope, inputs, label, options, admit)


@dataclass(frozen=True, slots=True)
class AnswerSource:
    """Where a request's answers come from: a cache, for what it may keep in `scope`, and models. `cache` None: models
    alone."""

    cache: AnswerCache | None = None
    scope: str | None = None

    async def look_up(self, model: TextModel, request: TextRequest) -> Lookup:
        """Look for the answer to a request. Raises as `AnswerCache.look_up`."""
        if self.cache is None:
            return Lookup(model, request)
        return await self.cache.look_up(model, request, self.scope)

    async def generate(self, lookup: Lookup, consumer: Consumer[TextEvent]) -> None:
        """Generate what was not found. Raises as `TextModel.generate`."""
        if self.cache is None or not lookup.key:
            await lookup.model.generate(lookup.request, consumer)
        else:
            await self.cache.generate(lookup, consumer)

    async def answer(self, model: TextModel, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        """Answer as `TextModel.generate`; what was kept comes as one event."""
        lookup = await self.look_up(model, request)
        lookup.note()
        if lookup.event is not None:
            await give(consumer, lookup.event)
        else:
            await self.generate(lookup, consumer)

    def wrap(self, encoder: TextEncoder | LlmEncoder) -> Embedder:
        """Return the encoder, with the cache before it where there is one."""
        return encoder if self.cache is None else CachedEncoder(self.cache, encoder, self.scope)
