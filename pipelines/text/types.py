"""What a protocol asks of a text model and gets back. All values are frozen."""

import msgspec

from engine.types import FinishReason


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation. The roles that a model takes are checked where its template is rendered."""

    role: str
    content: str


Prompt = str | list[int] | tuple[ChatMessage, ...]
"""Text to continue, token ids to continue, or a conversation to answer."""


class SamplingOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling fields that the client sent. None: not sent, so the model's default holds.

    Names and ranges are those of `engine.types.SamplingParams`. `max_tokens` None means all that the
    context and the KV cache leave after the prompt.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text to generate. Generation ends before the first of the `stop` strings."""

    request_id: str
    prompt: Prompt
    sampling: SamplingOverrides = SamplingOverrides()
    stop: tuple[str, ...] = ()


class TextEvent(msgspec.Struct, frozen=True, gc=False):
    """A piece of generated text. Only the last event of a request has a finish reason.

    `text` is empty on no event but the last. `num_tokens` counts the tokens generated since the event
    before, whether or not they show in `text`. `stop_reason` is the stop string or the stop token id that
    the request named and that ended it; None for the model's own end of sequence. The two totals are up to
    and with this event; those of the last one are the request's.
    """

    text: str
    num_tokens: int
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
