"""A hosted LLM's answer as text events, from the API's chunks or from its one whole answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.remote.client import ApiClient, Json
from sluice.pipelines.text.types import TextEvent

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_FILTERED = "content_filter"
_USAGE = {"stream_options": {"include_usage": True}}


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str:
        """The text. A model that declines answers in the field `refusal`."""
        return self.content or self.refusal or ""


class _Choice(msgspec.Struct, frozen=True):
    """A choice of a chat's stream (`delta`), of a whole chat (`message`), or of a completion (`text`)."""

    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        message = self.delta or self.message
        return message.words if message is not None else self.text or ""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct, frozen=True):
    """A chunk or a whole answer. The chunk with the usage has no choices, and some APIs send others without any."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class RemoteEvent(TextEvent, frozen=True, gc=False):
    """A piece of the answer, or its end. Counts are 0 until the end. The flags say whether the API gave them."""

    has_counts: bool = False
    has_cached_count: bool = False


async def generate(
    client: ApiClient, body: Json, deadline: float, *, streams: bool
) -> AsyncGenerator[RemoteEvent, None]:
    """Generate the events of a request; the last one has the finish reason. Closing the generator ends the request.

    Raises SluiceError, also in mid-answer: UNAVAILABLE where the API broke off, INVALID where its content filter did.
    """
    reader = _Reader(client)
    if not streams:
        text = reader.read(await client.ask(body, deadline))
        yield reader.end(text)
        return
    whole_body = body | _USAGE if client.options.include_usage else body
    async with aclosing(client.stream(whole_body, deadline)) as chunks:
        async for chunk in chunks:
            text = reader.read(chunk)
            if text:
                yield RemoteEvent(text, num_tokens=0, prompt_tokens=0, completion_tokens=0)
    yield reader.end()


class _Reader:
    """Reads the chunks of one answer, and keeps its finish reason and usage for the last event."""

    def __init__(self, client: ApiClient) -> None:
        self._errors = client.errors
        self._reason: str | None = None
        self._usage: _Usage | None = None
        self._num_pieces = 0

    def read(self, chunk: object) -> str:
        """Return the text of a chunk or a whole answer; "" where it has none."""
        try:
            answer = msgspec.convert(chunk, _Answer)
        except msgspec.ValidationError as error:
            raise self._errors.unreadable(error) from None
        self._usage = answer.usage or self._usage
        if not answer.choices:
            return ""
        choice = answer.choices[0]
        self._reason = choice.finish_reason or self._reason
        self._num_pieces += bool(choice.words)
        return choice.words

    def end(self, text: str = "") -> RemoteEvent:
        """Return the last event. Without the API's counts each piece counts as a token, as most APIs send them."""
        usage = self._usage or _Usage(completion_tokens=self._num_pieces)
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
        return RemoteEvent(
            text,
            num_tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=self._finish_reason(),
            cached_tokens=cached or 0,
            has_counts=self._usage is not None,
            has_cached_count=cached is not None,
        )

    def _finish_reason(self) -> FinishReason:
        if self._reason is None:
            raise self._errors.unavailable("broke off before the answer was complete")
        if self._reason == _FILTERED:
            raise SluiceError(ErrorCode.INVALID, "the remote's content filter ended the answer", param="messages")
        reason = _REASONS.get(self._reason)
        if reason is None:
            raise self._errors.unavailable(f"ended the answer with '{self._reason[:40]}', which is no text's end")
        return reason
