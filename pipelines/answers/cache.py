"""The answer cache: answers that a request determines, kept for equal requests in the server's response cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from sluice.engine.client.stream import Consumer
from sluice.pipelines.answers.notes import note_lookup
from sluice.pipelines.encoding import AdmitTokens, admit_all
from sluice.pipelines.encoding.encoder import Embeddings, TextEncoder
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.signature import Inputs
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText
from sluice.pipelines.remote.embedding import EncoderModel
from sluice.pipelines.remote.model import RemoteLlmModel
from sluice.pipelines.text.model import TextModel, fingerprint_of
from sluice.pipelines.text.sampling import SamplingDefaults, drop_random_seed
from sluice.pipelines.text.stream import Mapped, give, salted_form
from sluice.pipelines.text.tensor_model import TensorText
from sluice.pipelines.text.types import TextDetail, TextEvent, TextRequest
from sluice.serving.caching.response_cache import ResponseCache
from sluice.serving.model import Model

_KEY_BYTES = 16
_NOT_IN_ANSWERS = {
    "request_id": "",
    "priority": 0,
    "tenant": "",
    "timeout_s": None,
    "queue_timeout_s": None,
    "protocol": "",
    "session": "",
    "parent_session": "",
    "requires_budget": True,
}
"""Fields of a request that change no answer, and the values that all requests have in keys."""
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(TextEvent)
_own: WeakKeyDictionary[Model, str] = WeakKeyDictionary()
"""Identities of loaded models of which only this process knows that they stay the same."""
MAX_TEXT_CHARS = 1 << 20
"""Longest text that is kept: a longer one is not even collected."""
_NO_DEFAULTS = SamplingDefaults()


def text_key(identity: str, scope: str | None, request: TextRequest, tenant: str = "") -> bytes:
    """Return the key of an answer to `request`, whose prompt is encoded, by the model of that identity. `tenant` is the
    one that the request names, where only its own answers count."""
    sampling = {name: _sorted(value) for name, value in request.sampling.items()}
    request = msgspec.structs.replace(request, sampling=sampling, **_NOT_IN_ANSWERS)
    return _hash(("text-1", identity, scope, tenant, request))


def _sorted(value: Any) -> Any:
    """Return the pairs of a dictionary, whose keys may be numbers, which the encoder does not sort."""
    return sorted(value.items()) if isinstance(value, dict) else value


def vectors_key(identity: str, scope: str | None, inputs: Sequence[object], options: dict[str, Any]) -> bytes:
    """Return the key of the vectors of `inputs`, encoded with the options of `TextEncoder.embed`."""
    return _hash(("vectors-1", identity, scope, inputs, options))


def _hash(facts: object) -> bytes:
    return blake2b(_encoder.encode(facts), digest_size=_KEY_BYTES).digest()


def merge_events(events: Sequence[TextEvent]) -> TextEvent:
    """Return all events of an answer as one, which says the same."""
    first, end = events[0], events[-1]
    details = [each.detail for each in events if each.detail is not None]
    return TextEvent(
        text="".join([each.text for each in events]),
        num_tokens=sum(each.num_tokens for each in events),
        prompt_tokens=end.prompt_tokens or first.prompt_tokens,
        completion_tokens=end.completion_tokens,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        cached_tokens=end.cached_tokens,
        detail=_merge_details(details) if details else None,
    )


def _merge_details(details: Sequence[TextDetail]) -> TextDetail:
    logprobs = [each.logprobs for each in details if each.logprobs is not None]
    token_ids = [each.token_ids for each in details if each.token_ids is not None]
    end = details[-1]
    return TextDetail(
        logprobs=[entry for piece in logprobs for entry in piece] if logprobs else None,
        total_logprob=end.total_logprob,
        prompt_logprobs=next((each.prompt_logprobs for each in details if each.prompt_logprobs is not None), None),
        prompt_end=next((each.prompt_end for each in details if each.prompt_end), ""),
        token_starts=list(end.token_starts),
        token_ids=[token_id for piece in token_ids for token_id in piece] if token_ids else None,
        prompt_token_ids=next((each.prompt_token_ids for each in details if each.prompt_token_ids is not None), None),
        num_drafted=end.num_drafted,
        num_accepted=end.num_accepted,
    )


def encode_event(event: TextEvent) -> bytes:
    return _encoder.encode(event)


def decode_event(value: bytes) -> TextEvent | None:
    """Return the event of a value; None for a value that is none."""
    try:
        return _decoder.decode(value)
    except (ValueError, RecursionError):
        return None


class _Vectors(msgspec.Struct, array_like=True):
    shape: tuple[int, int]
    num_tokens: int
    raw: memoryview


_vectors_decoder = msgspec.msgpack.Decoder(_Vectors)


def encode_vectors(found: Embeddings) -> bytes:
    vectors = np.ascontiguousarray(found.vectors, np.float32)
    num_rows, dim = vectors.shape
    return _encoder.encode(_Vectors((num_rows, dim), found.num_tokens, memoryview(vectors.tobytes())))


def decode_vectors(value: bytes) -> Embeddings | None:
    """Return the vectors of a value; None for a value that is none."""
    try:
        packed = _vectors_decoder.decode(value)
        vectors = np.frombuffer(packed.raw, np.float32).reshape(packed.shape)
    except (ValueError, RecursionError):
        return None
    return Embeddings(vectors, packed.num_tokens)


def text_identity(model: TextModel) -> str | None:
    """Return what determines the answers of a text model; None for one whose answers depend on more, such as documents
    that a pipeline retrieves."""
    if isinstance(model, LlmText):
        return f"{model.fingerprint}:{model.files}"
    if isinstance(model, AdapterText):
        mark = model.base.engine.adapter_marks.get(model.adapter)
        return None if mark is None else f"{model.fingerprint}:{model.base.files}:{model.root}:{mark}"
    if isinstance(model, TensorText) and not model.takes_parameters:
        return _model_identity(model.model)
    return None


def encoder_identity(encoder: TextEncoder | LlmEncoder) -> str:
    """Return what determines the vectors of an encoder. Raises UNAVAILABLE for one that does not serve."""
    if isinstance(encoder, LlmEncoder):
        return f"{encoder.text.fingerprint}:{encoder.text.files}"
    return ":".join(map(_model_identity, encoder.models_used()))


def _model_identity(model: Model) -> str:
    if isinstance(model, RemoteLlmModel | EncoderModel):  # its configuration says all, and gateways may share it
        return fingerprint_of(model.name, model.version, model.config.SerializeToString(deterministic=True))
    found = _own.get(model)
    if found is None:
        found = _own[model] = f"{model.name}:{model.version}:{uuid4().hex}"
    return found


@dataclass(slots=True)
class AnswerCounts:
    """Counts what became of one model's answers that may be kept."""

    num_hits: int = 0
    num_misses: int = 0
    kept_bytes: int = 0
    """Bytes of the answers that were kept, whether or not they still are."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a look-up for a request to a model. `request` has its prompt encoded where that took place. `key`
    b"" means that the answer is not kept, and `event` is the whole answer where there is one."""

    model: TextModel
    request: TextRequest
    key: bytes = b""
    event: TextEvent | None = None

    def note(self) -> None:
        """Have the headers of the answer say whether it was kept, where it could be."""
        if self.key:
            note_lookup(is_hit=self.event is not None)


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
        prompt = await model.prepare_shared(request.prompt, salted_form(request))
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


AnyEncoder = TextEncoder | LlmEncoder | CachedEncoder


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

    def wrap(self, encoder: TextEncoder | LlmEncoder) -> AnyEncoder:
        """Return the encoder, with the cache before it where there is one."""
        return encoder if self.cache is None else CachedEncoder(self.cache, encoder, self.scope)
