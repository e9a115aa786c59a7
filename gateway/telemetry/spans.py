"""Spans of generations, with attributes by OpenTelemetry's conventions for generative AI."""

from gateway.calls import current_identity
from pipelines.text.types import TextEvent
from sluice.spans import Attributes, Span, current_span

_CHATS = ("chat", "anthropic", "messages", "responses")
"""Parts of the protocols' names whose requests are conversations."""


def begin_generation(model: str, protocol: str) -> Span | None:
    """Begin the span of a generation, and make it the current one; None where nobody records."""
    above = current_span.get()
    if above is None:
        return None
    recording = above.recording
    if not recording.model:
        recording.model = model
        identity = current_identity()
        recording.owner = None if identity is None else (identity.key_id, identity.name)
        if recording.on_generation is not None:
            recording.on_generation(recording)
    operation = "chat" if any(word in protocol for word in _CHATS) else "text_completion"
    attributes: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "sluice"}
    attributes |= {"gen_ai.request.model": model, "gen_ai.response.model": model, "sluice.protocol": protocol}
    span = above.child(f"{operation} {model}", attributes)
    current_span.set(span)
    return span


def note_answer(span: Span, end: TextEvent) -> None:
    """Note what the last event of an answer says."""
    assert end.finish_reason is not None
    span.attributes |= {
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.output_tokens": end.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
        "gen_ai.response.finish_reasons": (end.finish_reason.value,),
    }


def end_generation(span: Span, outcome: str) -> None:
    """End the span, and what is open within it; `outcome` is `ok`, `cancelled` or an error code."""
    span.attributes["sluice.outcome"] = outcome
    span.end_all()
    if current_span.get() is span:
        current_span.set(span.parent)
