"""The shape of OpenAI's answers: chunks when streamed, one object when whole; token counts and log probabilities."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from msgspec.structs import replace

from sluice.errors import SluiceError
from sluice.gateway.api.fields import cache_miss_fields
from sluice.gateway.api.translators import Reply
from sluice.gateway.front.http.errors import openai_error_body
from sluice.gateway.front.http.sse import DONE, PLACEHOLDER, TextFrame, event_frame
from sluice.pipelines.text.citations import encoding_field, to_json_objects
from sluice.pipelines.text.detokenizer import REPLACEMENT_CHARACTER
from sluice.pipelines.text.types import Part, TextDetail, TextEvent, TextLogprob, TokenText

JsonObject = dict[str, Any]
LOWEST = -9999.0
"""Log probability of a token that cannot come, as OpenAI writes it: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The parts of an answer that the client chooses.

    Each of `num_prompts` prompts gets `n` choices, the likeliest of `best_of` sequences. With `include_usage` a stream
    ends with the token counts, and with `continuous_usage` each of its chunks has those of its choice so far.
    `top_logprobs` and `prompt_logprobs` are the numbers of alternatives; None leaves out log probabilities.
    `service_tier` is the one that the answer names; None for none. `names_tokens_by_id` names tokens `token_id:N` in
    log probabilities. With `has_functions` a call has OpenAI's earlier shape; without `has_reasoning` the reasoning is
    left out.
    """

    num_prompts: int
    n: int = 1
    best_of: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    service_tier: str | None = None
    returns_token_ids: bool = False
    names_tokens_by_id: bool = False
    has_functions: bool = False
    has_reasoning: bool = True


@dataclass(slots=True)
class Choice:
    """One text as it is collected: its events, and the parts that a `ChatReader` found in them."""

    events: list[TextEvent] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join([event.text for event in self.events])

    @property
    def end(self) -> TextEvent:
        return self.events[-1]

    @property
    def details(self) -> list[TextDetail]:
        return [event.detail for event in self.events if event.detail is not None]

    @property
    def logprobs(self) -> list[TextLogprob]:
        return [entry for detail in self.details for entry in detail.logprobs or ()]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for detail in self.details for token_id in detail.token_ids or ()]

    @property
    def mean_logprob(self) -> float:
        """Mean over every token, the one that ended the text included."""
        detail = self.end.detail
        return detail.total_logprob / max(self.end.completion_tokens, 1) if detail is not None else 0.0


class OpenAIReply(Reply):
    """Formats one answer: its head here, its choices in a subclass."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, *, reply_id: str, created: int, model: str, fingerprint: str, options: ReplyOptions) -> None:
        """`created` is in Unix seconds."""
        head = {"id": reply_id, "object": self.kind, "created": created, "model": model}
        tier = {} if options.service_tier is None else {"service_tier": options.service_tier}
        self._head = {**head, "system_fingerprint": fingerprint, **tier}
        self._chunk_head = {**self._head, "object": self.chunk_kind}
        self._options = options
        self._text_frames = [self._empty_frame(index) for index in range(self._num_choices)]
        self._has_begun = False
        self._ends: dict[int, TextEvent] = {}
        """The last event of each stream that has ended."""
        self._collected = [Choice() for _ in range(options.num_prompts * options.best_of)]

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        """Return a streamed choice with more text."""

    @abstractmethod
    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        """Return a streamed choice with its finish reason."""

    @abstractmethod
    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        """Return a whole choice."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        """Return the log probabilities of a choice or of a piece of one."""

    def piece_fields(self, detail: TextDetail) -> JsonObject:
        """Return further fields of a streamed choice."""
        return {}

    def opening(self, first: TextEvent) -> bytes:
        """Return the frames that a stream sends before its first event, of whichever choice."""
        return b""

    def extra_fields(self, choices: Sequence[Choice]) -> JsonObject:
        """Return further fields of a whole answer."""
        return {}

    def prompt_fields(self, details: Sequence[TextDetail]) -> JsonObject:
        """Return what vLLM says of a prompt, from the details of the events that one of its choices has so far."""
        options = self._options
        fields: JsonObject = {}
        for detail in details:
            if options.prompt_logprobs is not None and detail.prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(detail.prompt_logprobs, options.prompt_logprobs)
            if detail.prompt_token_ids is not None:
                fields["prompt_token_ids"] = detail.prompt_token_ids
        return fields

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens that are reasoning, in all sequences; known after their last events."""
        return 0

    def token_fields(self, token_ids: list[int] | None) -> JsonObject:
        """Return the ids of a choice's tokens, or of a piece's, where the client wants them."""
        return {"token_ids": token_ids or []} if self._options.returns_token_ids else {}

    def frame(self, index: int, event: TextEvent) -> bytes:
        """Return the frames of an event of stream `index`: its text, also where its tokens complete none, and its end
        where it is the last.

        The opening goes out with the first event of any stream.
        """
        frame = b"" if self._has_begun else self.opening(event)
        self._has_begun = True
        if event.finish_reason is not None:
            self._ends[index] = event
        if event.detail is not None:
            return frame + self._detailed_frame(index, event, event.detail)
        if event.text or event.finish_reason is None:
            frame += self._text_frame(index, event)
        if event.finish_reason is not None:
            frame += self._choice_frame(self.last_piece(index, event, None), event)
        return frame

    def _text_frame(self, index: int, event: TextEvent) -> bytes:
        if self._options.continuous_usage:
            return self._choice_frame(self.piece(index, event.text, None), event)
        return self._text_frames[index].fill(event.text)

    def _choice_frame(self, piece: JsonObject, event: TextEvent) -> bytes:
        return event_frame(self.chunk(piece, event.prompt_tokens, event.completion_tokens))

    def _detailed_frame(self, index: int, event: TextEvent, detail: TextDetail) -> bytes:
        logprobs, frame = self._format_logprobs(detail.logprobs or ()), b""
        if event.finish_reason is None and detail.retrieval is not None:
            # The chunk has an empty choice, because many clients read the first choice of every chunk.
            frame = event_frame({**self.chunk(self.piece(index, "", None)), **sources_field(detail)})
        fields = {**self.token_fields(detail.token_ids), **self.piece_fields(detail)}
        if event.text or (event.num_tokens and event.finish_reason is None):
            frame += self._choice_frame({**self.piece(index, event.text, logprobs), **fields}, event)
            logprobs, fields = None, self.token_fields(None)
        if event.finish_reason is not None:
            last = self.last_piece(index, event, logprobs if detail.logprobs else None)
            frame += self._choice_frame({**last, **fields}, event)
        return frame

    async def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        counts = self._usage([self._ends[index] for index in sorted(self._ends)])
        return event_frame({**self._chunk_head, "choices": [], "usage": counts}) + DONE

    def collector(self, index: int) -> Callable[[TextEvent], object]:
        return self._collected[index].events.append

    async def whole(self) -> bytes:
        """Return the answer as one object, with the likeliest of each prompt's sequences, which stand side by side."""
        sequences = self._collected
        counts = self._usage([sequence.end for sequence in sequences])
        choices = self._likeliest(sequences)
        objects = [self.choice(i, choice, self._format_logprobs(choice.logprobs)) for i, choice in enumerate(choices)]
        answer = {**self._head, "choices": objects, "usage": counts, **self.extra_fields(choices)}
        return orjson.dumps({**answer, **self._sources(choices, objects)})

    def _sources(self, choices: Sequence[Choice], objects: Sequence[JsonObject]) -> JsonObject:
        """Return the sources of the one prompt; with several prompts, add each prompt's to its choices."""
        if self._options.num_prompts == 1:
            return sources_field(choices[0].end.detail)
        for choice, fields in zip(choices, objects, strict=True):
            fields |= sources_field(choice.end.detail)
        return {}

    def _usage(self, ends: Sequence[TextEvent]) -> JsonObject | None:
        return usage(ends, self._options.num_prompts, self.num_reasoning_tokens)

    def _likeliest(self, sequences: Sequence[Choice]) -> Sequence[Choice]:
        if len(sequences) == self._num_choices:
            return sequences
        best_of = self._options.best_of
        groups = [sequences[start : start + best_of] for start in range(0, len(sequences), best_of)]
        ranked = [sorted(group, key=lambda choice: choice.mean_logprob, reverse=True) for group in groups]
        return [choice for group in ranked for choice in group[: self._options.n]]

    def _format_logprobs(self, entries: Sequence[TextLogprob]) -> JsonObject | None:
        num_top = self._options.top_logprobs
        if num_top is None:
            return None
        return self.logprobs(_named_by_id(entries) if self._options.names_tokens_by_id else entries, num_top)

    def chunk(self, piece: JsonObject, num_prompt: int = 0, num_output: int = 0) -> JsonObject:
        """Return a stream's object with one choice, which has so many tokens up to here."""
        chunk = {**self._chunk_head, "choices": [piece]}
        if not self._options.include_usage:
            return chunk
        return {**chunk, "usage": _counts(num_prompt, num_output) if self._options.continuous_usage else None}

    @property
    def _num_choices(self) -> int:
        return self._options.num_prompts * self._options.n

    def _empty_frame(self, index: int) -> TextFrame:
        return TextFrame.around(self.chunk(self.piece(index, PLACEHOLDER, None)))


def error_frame(error: SluiceError) -> bytes:
    """Return the last event of a stream that failed; no `[DONE]` follows it."""
    return b"data: " + openai_error_body(error) + b"\n\n"


def usage(ends: Sequence[TextEvent], num_prompts: int, num_reasoning: int = 0) -> JsonObject | None:
    """Return OpenAI's token counts, from the last events of a request's streams, those of one prompt side by side.

    A prompt counts once, however often it was continued. None where a pipeline's model does not count.
    """
    if not all(end.prompt_tokens or end.completion_tokens for end in ends):
        return None
    group_size = len(ends) // num_prompts
    groups = [ends[start : start + group_size] for start in range(0, len(ends), group_size)]
    prompt_tokens = sum(group[0].prompt_tokens for group in groups)
    completion_tokens = sum(end.completion_tokens for end in ends)
    # The other sequences find what the first one computed.
    cached_tokens = sum(min(end.cached_tokens for end in group) for group in groups)
    return {
        **_counts(prompt_tokens, completion_tokens),
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0, **_cache_miss(ends)},
        "completion_tokens_details": _completion_details(ends, num_reasoning),
    }


def _cache_miss(ends: Sequence[TextEvent]) -> JsonObject:
    """Return the field `cache_miss`, of the first sequence that has one."""
    details = [end.detail for end in ends if end.detail is not None]
    miss = next((each.cache_miss for each in details if each.cache_miss is not None), None)
    return {} if miss is None else cache_miss_fields(miss)


def _completion_details(ends: Sequence[TextEvent], num_reasoning: int) -> JsonObject:
    """Return what became of the drafts too: of a prediction, and of the text before, where the answer repeats it."""
    details = [end.detail for end in ends if end.detail is not None]
    num_accepted = sum(detail.num_accepted for detail in details)
    return {
        "reasoning_tokens": num_reasoning,
        "audio_tokens": 0,
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": sum(detail.num_drafted for detail in details) - num_accepted,
    }


def _counts(num_prompt: int, num_output: int) -> JsonObject:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def ending_fields(end: TextEvent) -> JsonObject:
    """Return a choice's last fields. `stop_reason` is vLLM's: the stop string or token id that matched."""
    return {"finish_reason": end.finish_reason, "stop_reason": end.stop_reason, **citations_field(end)}


def sources_field(detail: TextDetail | None) -> dict[str, Any]:
    """Return the field `sources` of an answer, where documents were retrieved, and `encoding` while some are added."""
    found = detail.retrieval if detail is not None else None
    return {} if found is None else {"sources": to_json_objects(found.sources), **encoding_field(found.encoding)}


def citations_field(end: TextEvent) -> dict[str, Any]:
    """Return the field `citations` of a choice, where documents were retrieved."""
    found = end.detail.retrieval if end.detail is not None else None
    return {} if found is None else {"citations": to_json_objects(found.citations)}


def _named_by_id(entries: Sequence[TextLogprob]) -> list[TextLogprob]:
    """Return log probabilities whose tokens have vLLM's `token_id:N` for a text. Chats keep the tokens' bytes."""

    def name(token: TokenText) -> TokenText:
        return replace(token, text=f"token_id:{token.token_id}")

    return [
        replace(entry, token=name(entry.token), top=tuple((name(token), logprob) for token, logprob in entry.top))
        for entry in entries
    ]


def chat_logprobs(entries: Sequence[TextLogprob], num_top: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion."""
    content = [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(token, logprob) for token, logprob in entry.top[:num_top]],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.spelled)}


def completion_logprobs(entries: Sequence[TextLogprob], num_top: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion."""
    return {
        "text_offset": [entry.start for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "tokens": [_label(entry.token) for entry in entries],
        "top_logprobs": [_by_label(entry, num_top) for entry in entries],
    }


def _label(token: TokenText) -> str:
    """Return a token's text; OpenAI's `bytes:\\xe2\\x80` for one that is no whole character."""
    if REPLACEMENT_CHARACTER not in token.text or token.text.encode() == token.spelled:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.spelled)


def _by_label(entry: TextLogprob, num_top: int) -> dict[str, float | None] | None:
    """Return the likeliest tokens and the chosen one by label, or by vLLM's `token_id:N` where another one has it."""
    if entry.logprob is None:
        return None
    chosen = _label(entry.token)
    logprobs: dict[str, float | None] = {}
    for token, logprob in entry.top[:num_top]:
        label = _label(token)
        is_taken = label in logprobs or label == chosen
        name = f"token_id:{token.token_id}" if is_taken and token.token_id != entry.token.token_id else label
        logprobs[name] = finite(logprob)
    logprobs.setdefault(chosen, finite(entry.logprob))
    return logprobs


def prompt_logprobs(entries: Sequence[TextLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt, its own and the likeliest by token id."""
    return [_by_id(entry, num_top) for entry in entries]


def _by_id(entry: TextLogprob, num_top: int) -> dict[str, Any] | None:
    """Return the token and the likeliest ones by token id. `rank` counts from 1; null: not among the likeliest."""
    if entry.logprob is None:
        return None
    ranks = {token.token_id: rank for rank, (token, _) in enumerate(entry.top, 1)}
    shown = [(entry.token, entry.logprob), *entry.top[:num_top]]
    return {
        str(token.token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token.token_id),
            "decoded_token": token.text,
        }
        for token, logprob in shown
    }


def finite(logprob: float | None) -> float | None:
    """Return a log probability as JSON can have it."""
    return None if logprob is None else max(logprob, LOWEST)
