"""What the two OpenAI answers have in common: chunks when streamed, one object when whole."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from gateway.http.errors import openai_error_body
from gateway.http.frames import DONE, HOLE, TextFrame, event_frame
from gateway.http.retrieval import citations_of, sources_of
from pipelines.text.types import TextDetail, TextEvent, TextLogprob
from sluice.errors import SluiceError

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the client wants to be told besides text.

    Of each of `num_prompts` prompts `n` choices. With `include_usage` a stream ends with the token counts.
    `top_logprobs` and `prompt_logprobs` say how many alternatives to tell; None tells no log probabilities at all.
    """

    num_prompts: int
    n: int = 1
    include_usage: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished text, the event that ended it, and what the events before told."""

    text: str
    end: TextEvent
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: list[TextLogprob] | None = None

    @property
    def mean_logprob(self) -> float:
        """Of every token, the one that ended the text included."""
        detail = self.end.detail
        return detail.total_logprob / self.end.completion_tokens if detail is not None else 0.0


def usage(ends: Sequence[TextEvent], num_prompts: int) -> JsonObject | None:
    """OpenAI's token counts, from the last events of a request's streams, those of one prompt together.

    A prompt counts once, however often it was continued. None where a pipeline's model does not count.
    """
    if not all(end.completion_tokens for end in ends):
        return None
    of_one_prompt = len(ends) // num_prompts
    groups = [ends[start : start + of_one_prompt] for start in range(0, len(ends), of_one_prompt)]
    prompt_tokens = sum(group[0].prompt_tokens for group in groups)
    completion_tokens = sum(end.completion_tokens for end in ends)
    # The other sequences find what the first one computed.
    cached_tokens = sum(min(end.cached_tokens for end in group) for group in groups)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def ending(end: TextEvent) -> JsonObject:
    """A choice's last fields. `stop_reason` is vLLM's: the stop string or token id that matched."""
    return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason, **citations_of(end)}


def error_frame(error: SluiceError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return b"data: " + openai_error_body(error) + b"\n\n"


class Reply(ABC):
    """The shapes of one answer: its head, and what a subclass says of its choices."""

    protocol: ClassVar[str]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, *, reply_id: str, created: int, model: str, options: ReplyOptions) -> None:
        """`created` is in Unix seconds."""
        self._head = {"id": reply_id, "object": self.kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        self._options = options
        self._text_frames = [self._text_frame(index) for index in range(self._num_choices)]

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        """A streamed choice with more text."""

    @abstractmethod
    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        """A streamed choice that says why it ended."""

    @abstractmethod
    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        """A whole choice."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        """Log probabilities of a choice or of a piece of one."""

    def opening(self) -> bytes:
        """What a stream sends before its first text."""
        return b""

    def fields_of(self, choices: Sequence[Choice]) -> JsonObject:
        """Further fields of a whole answer."""
        return {}

    def frame(self, index: int, event: TextEvent) -> bytes:
        """`event` of stream `index`: its text, and its end where it is the last."""
        if event.detail is not None:
            return self._detailed_frame(index, event, event.detail)
        frame = self._text_frames[index].fill(event.text) if event.text else b""
        if event.finish_reason is not None:
            frame += event_frame(self.chunk(self.last_piece(index, event, None)))
        return frame

    def _detailed_frame(self, index: int, event: TextEvent, detail: TextDetail) -> bytes:
        told, frame = self._told(detail.logprobs or ()), b""
        if event.finish_reason is None and detail.retrieval is not None:
            # With a choice, as many clients look into the first one of every chunk.
            frame = event_frame({**self.chunk(self.piece(index, "", None)), **sources_of(detail)})
        if event.text:
            frame += event_frame(self.chunk(self.piece(index, event.text, told)))
            told = None
        if event.finish_reason is not None:
            frame += event_frame(self.chunk(self.last_piece(index, event, told if detail.logprobs else None)))
        return frame

    def closing(self, ends: Sequence[TextEvent]) -> bytes:
        """What a stream sends after all its choices ended as `ends`."""
        if not self._options.include_usage:
            return DONE
        counts = usage(ends, self._options.num_prompts)
        return event_frame({**self._chunk_head, "choices": [], "usage": counts}) + DONE

    def whole(self, sequences: Sequence[Choice]) -> bytes:
        """The answer as one object. Of each prompt's sequences, which stand together, it tells the likeliest."""
        counts = usage([sequence.end for sequence in sequences], self._options.num_prompts)
        choices = self._likeliest(sequences)
        shown = [self.choice(i, choice, self._told(choice.logprobs)) for i, choice in enumerate(choices)]
        answer = {**self._head, "choices": shown, "usage": counts, **self.fields_of(choices)}
        return orjson.dumps({**answer, **self._sources(choices, shown)})

    def _sources(self, choices: Sequence[Choice], shown: Sequence[JsonObject]) -> JsonObject:
        """Beside the choices, whose prompt is one; of several prompts, with each choice."""
        if self._options.num_prompts == 1:
            return sources_of(choices[0].end.detail)
        for choice, fields in zip(choices, shown, strict=True):
            fields |= sources_of(choice.end.detail)
        return {}

    def _likeliest(self, sequences: Sequence[Choice]) -> Sequence[Choice]:
        if len(sequences) == self._num_choices:
            return sequences
        best_of = len(sequences) // self._options.num_prompts
        groups = [sequences[start : start + best_of] for start in range(0, len(sequences), best_of)]
        ranked = [sorted(group, key=lambda choice: choice.mean_logprob, reverse=True) for group in groups]
        return [choice for group in ranked for choice in group[: self._options.n]]

    def _told(self, entries: Sequence[TextLogprob]) -> JsonObject | None:
        num_top = self._options.top_logprobs
        return None if num_top is None else self.logprobs(entries, num_top)

    def chunk(self, piece: JsonObject) -> JsonObject:
        """A stream's object with one choice."""
        chunk = {**self._chunk_head, "choices": [piece]}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    @property
    def _num_choices(self) -> int:
        return self._options.num_prompts * self._options.n

    def _text_frame(self, index: int) -> TextFrame:
        return TextFrame.around(self.chunk(self.piece(index, HOLE, None)))
