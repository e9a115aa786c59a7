"""What is kept of an answer, and under which key: the events of a text as one, and the vectors of texts."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from sluice.pipelines.encoding.encoder import Embeddings
from sluice.pipelines.text.types import TextDetail, TextEvent, TextRequest

_KEY_BYTES = 16
_NOT_IN_ANSWERS = {
    "request_id": "",
    "priority": 0,
    "tenant": "",
    "timeout_s": None,
    "queue_timeout_s": None,
    "protocol": "",
    "session": "",
}
"""Fields of a request that change no answer, and the values that all requests have in keys."""
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(TextEvent)


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
