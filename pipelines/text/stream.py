"""Token events to text events: incremental text, stop strings, the consumers of events, a stream's measurement."""

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from time import perf_counter_ns
from typing import Any, Generic, TypeVar

import msgspec

from sluice.engine.client.stream import Consumer
from sluice.engine.types import EventDetail, FinishReason, SamplingParams, SequenceMetrics, TokenEvent
from sluice.errors import ErrorCode, SluiceError, invalid, named
from sluice.pipelines.text.detokenizer import Detokenizer
from sluice.pipelines.text.logprobs import LogprobTracker, PromptEcho
from sluice.pipelines.text.sessions import FindReplica, PromptWatch
from sluice.pipelines.text.types import (
    ENDED_EARLY,
    CacheMiss,
    EncodedPrompt,
    PlainPrompt,
    Prompt,
    PromptForm,
    TextDetail,
    TextEvent,
    TextRequest,
)
from sluice.record.spans import current_span

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
"""Characters. Both limits bound the cost of searching one piece of text."""
T = TypeVar("T")
U = TypeVar("U")

Generate = Callable[[Consumer[TextEvent]], Coroutine[Any, Any, None]]
"""Generates one text: pushes its events to a consumer, up to the last one. Cancelling it cancels the request."""
ObserveDetail = Callable[[EventDetail], None]


class TextStream:
    """Makes the text events of one generation: detokenizes, ends at stop strings, counts. Only its task uses it. The
    text does not depend on how tokens are merged into events, and the last event has the number of tokens used. Stop
    strings are searched in the text after the first `min_tokens` tokens."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        sampling: SamplingParams,
        prompt_tokens: int,
        logprobs: LogprobTracker | None = None,
        *,
        includes_stop: bool = False,
        prompt_token_ids: list[int] | None = None,
        notes_starts: bool = False,
    ) -> None:
        """Take `logprobs` and `prompt_token_ids` to give events details: log probabilities, and token ids. With
        `includes_stop` the text ends after what stopped it; with `notes_starts` the last event says where each token
        begins. Raises INVALID for stop strings that are not allowed."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop, is_included=includes_stop) if stop else None
        self._includes_stop = includes_stop
        self._stop_token_ids = sampling.stop_token_ids
        self._min_tokens = sampling.min_tokens
        self._prompt_tokens = prompt_tokens
        self._logprobs = logprobs
        self._prompt_token_ids = prompt_token_ids
        self._token_ids: list[int] | None = None if prompt_token_ids is None else []
        """Tokens that no event has shown yet; None where events show none."""
        self._metrics: SequenceMetrics | None = None
        self._cached_tokens = 0
        self._logits = b""
        self._starts = array("I") if notes_starts else None
        self._made = 0
        """Characters that the tokens in `_starts` stand for."""
        self._is_plain = self._stops is None and logprobs is None and not notes_starts
        """Whether an event shows all of its tokens, and never ends the text before them."""
        self._completion_tokens = 0
        self._reported_tokens = 0

    def feed(self, event: TokenEvent) -> TextEvent | None:
        """Return the text that `event` completes, empty where its tokens complete none. None where it has no tokens.
        Nothing follows a last event."""
        if event.detail is not None:
            self._note(event.detail)
        token_ids, finish_reason = event.token_ids, event.finish_reason
        if finish_reason is FinishReason.STOP and not self._includes_stop:
            return self._finish_by_token(token_ids[:-1], token_ids[-1])
        text = self._show(token_ids)
        if finish_reason is None and self._stops is None:
            return self._event(text) if token_ids else None
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        if finish_reason is None:
            return self._event(text) if token_ids else None
        stop_reason = self._stop_token(token_ids[-1]) if finish_reason is FinishReason.STOP else None
        return self._finish(text, finish_reason, stop_reason)

    def _note(self, detail: EventDetail) -> None:
        if detail.num_cached_tokens is not None:
            self._cached_tokens = detail.num_cached_tokens
        if detail.num_prompt_tokens is not None:
            self._prompt_tokens = detail.num_prompt_tokens
        if detail.metrics is not None:
            self._metrics = detail.metrics
        if detail.generation_logits is not None:
            self._logits += detail.generation_logits
        if self._logprobs is not None:
            self._logprobs.expect(detail)

    def _finish_by_token(self, shown: Sequence[int], last: int) -> TextEvent:
        """Count the token that ended the sequence, and do not show it."""
        text = self._show(shown)
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        self._completion_tokens += 1
        if self._token_ids is not None:
            self._token_ids.append(last)
        if self._logprobs is not None:
            self._logprobs.add_end()
        return self._finish(text, FinishReason.STOP, self._stop_token(last))

    def _stop_token(self, last: int) -> int | None:
        return last if last in self._stop_token_ids else None

    def _finish(self, text: str, reason: FinishReason, stop_reason: int | None) -> TextEvent:
        tail = self._detokenizer.flush()
        if self._stops is None:
            return self._event(text + tail, reason, stop_reason)
        text += self._stops.feed(tail)
        if self._matched is not None:
            return self._event(text, FinishReason.STOP, self._matched)
        return self._event(text + self._stops.flush(), reason, stop_reason)

    @property
    def _matched(self) -> str | None:
        return self._stops.matched if self._stops is not None else None

    def _show(self, token_ids: Sequence[int]) -> str:
        if self._is_plain:
            self._completion_tokens += len(token_ids)
            if self._token_ids is not None:
                self._token_ids += token_ids
            return self._detokenizer.feed(token_ids)
        return self._show_each(token_ids)

    def _show_each(self, token_ids: Sequence[int]) -> str:
        """Show token by token: the one that completes a stop string is the last one counted."""
        pieces = []
        for token_id in token_ids:
            self._completion_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(token_id)
            piece = self._detokenizer.feed((token_id,))
            if self._logprobs is not None:
                self._logprobs.add(piece)
            if self._starts is not None:
                self._starts.append(self._made)
                self._made += len(piece)
            if self._stops is not None and self._completion_tokens > self._min_tokens:
                piece = self._stops.feed(piece)
            pieces.append(piece)
            if self._matched is not None:
                break
        return "".join(pieces)

    def _event(
        self, text: str, finish_reason: FinishReason | None = None, stop_reason: str | int | None = None
    ) -> TextEvent:
        total = self._completion_tokens
        num_tokens, self._reported_tokens = total - self._reported_tokens, total
        detail = None
        if self._logprobs is not None:
            detail = self._logprobs.take(text, finish_reason is not None and self._matched is None)
        if self._metrics is not None and finish_reason is not None:
            drafted, accepted = self._metrics.num_drafted, self._metrics.num_accepted
            detail = msgspec.structs.replace(detail or TextDetail(), num_drafted=drafted, num_accepted=accepted)
        if self._starts is not None and finish_reason is not None:
            detail = msgspec.structs.replace(detail or TextDetail(), token_starts=self._starts)
        if self._token_ids is not None:
            detail = self._with_token_ids(detail or TextDetail(), self._token_ids)
        if self._logits:
            detail, self._logits = msgspec.structs.replace(detail or TextDetail(), logits=self._logits), b""
        prompt, cached = self._prompt_tokens, self._cached_tokens
        return TextEvent(text, num_tokens, prompt, total, finish_reason, stop_reason, cached, detail)

    def _with_token_ids(self, detail: TextDetail, token_ids: list[int]) -> TextDetail:
        prompt, self._prompt_token_ids, self._token_ids = self._prompt_token_ids, None, []
        return msgspec.structs.replace(detail, token_ids=token_ids, prompt_token_ids=prompt)


class StopStrings:
    """Passes on text up to the first stop string to be complete, the longest of several at one character, however the
    text is cut into pieces. Only text that could be the beginning of a stop string is kept back."""

    def __init__(self, strings: tuple[str, ...], *, is_included: bool = False) -> None:
        """Raise SluiceError INVALID where a string is empty or too long, or where there are too many."""
        _check_stop_strings(strings)
        self._strings = strings
        self._is_included = is_included
        self._first_chars = frozenset(string[0] for string in strings)
        self._pending = ""
        self.matched: str | None = None
        """The stop string that was found. The text ends before it, or after it where it `is_included`, and nothing may
        be fed any more."""

    def feed(self, piece: str) -> str:
        """Add text and return what certainly stands before any stop string."""
        if not self._pending and self._first_chars.isdisjoint(piece):
            return piece
        text = self._pending + piece
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            end_of_string, end, self.matched = min(found)
            end = end_of_string if self._is_included else end
            self._pending = ""
        else:
            end = min((find_partial(text, s) for s in self._strings), default=len(text))
            self._pending = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Return the text kept back, at the end of the text."""
        text, self._pending = self._pending, ""
        return text


def find_partial(text: str, string: str) -> int:
    """Return where the longest suffix of `text` that begins `string` starts; len(text) where there is none."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0:
        if string.startswith(text[start:]):
            return start
        start = text.find(string[0], start + 1)
    return len(text)


def _check_stop_strings(strings: tuple[str, ...]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"{named('stop')} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise invalid(
                "stop",
                f"{named('stop')}[{index}] has {len(string)} characters; from 1 to {MAX_STOP_LENGTH} are allowed",
            )


def salted_form(request: TextRequest) -> PromptForm:
    """Return the form of a request's prompt, with its salt."""
    form, salt = request.prompt_form, request.cache_salt
    return msgspec.structs.replace(form, salt=salt) if salt else form


def sent_prompt(prompt: Prompt) -> PlainPrompt:
    """Return the prompt as the client sent it."""
    return prompt.source if isinstance(prompt, EncodedPrompt) else prompt


def with_prompt_end(event: TextEvent, prompt_end: str) -> TextEvent:
    """Return the first event with the end of the prompt, for a `ChatReader`."""
    detail = msgspec.structs.replace(event.detail or TextDetail(), prompt_end=prompt_end)
    return msgspec.structs.replace(event, detail=detail)


def with_cache_miss(event: TextEvent, miss: CacheMiss) -> TextEvent:
    """Return the event with the reason for which tokens of its prompt were computed again."""
    detail = msgspec.structs.replace(event.detail or TextDetail(), cache_miss=miss)
    return msgspec.structs.replace(event, detail=detail)


# -- how a stream is measured


class StreamRecord:
    """The measurements of one LLM request: tokens, time to first token, gaps. This one measures nothing."""

    __slots__ = ()

    def watch(
        self, key: str, model: str, request: TextRequest, prompt: EncodedPrompt, block_size: int, replica: FindReplica
    ) -> PromptWatch | None:
        """Return what finds out why the session's prompt was computed again, where this is looked into. `key` tells
        sessions apart."""
        return None

    async def admit(self, prompt_tokens: int, max_tokens: int, adapter: str = "") -> float | None:
        """Note what the generation can use at most, before it is submitted, and return the weight of its tenant; None
        where the engine knows it. Raises SluiceError to refuse the generation."""
        return None

    def observe(self, event: TextEvent) -> None:
        """Count an event that is about to go to the client."""

    def fail(self, error: Exception) -> None:
        """Note that the request failed."""

    def close(self) -> None:
        """Count the request: it has ended."""


class SharedPrompt:
    """One prompt of a request that has several generations, as those of this prompt see it."""

    __slots__ = ("at_end", "index", "parts")

    def __init__(self, index: int, parts: dict[object, object], at_end: ExitStack) -> None:
        """`parts` is the same for all prompts of the request: its parts by whatever tells models apart. So is `at_end`,
        which counts them when the generations have ended."""
        self.index = index
        self.parts = parts
        self.at_end = at_end


current_prompt: ContextVar[SharedPrompt | None] = ContextVar("current_prompt", default=None)
"""The prompt that the generations of this task and of its child tasks continue; None where a request has one alone."""


@contextmanager
def share_request(num_prompts: int, num_generations: int) -> Iterator[Callable[[int], object]]:
    """Have the generations of a request that begin and end within the context counted as one request, each prompt once.

    Yields a function that the task of each generation calls first, with the index of its prompt.
    """
    if num_generations == 1:
        yield lambda index: None
        return
    with ExitStack() as at_end:
        parts: dict[object, object] = {}
        prompts = [SharedPrompt(index, parts, at_end) for index in range(num_prompts)]
        yield lambda index: current_prompt.set(prompts[index])


DETOKENIZE_MS = "sluice.detokenize_ms"
"""The attribute of a generation's span with the time of making text of its tokens."""
_NS_PER_MS = 1_000_000
Feed = Callable[[TokenEvent], TextEvent | None]
OpenRecord = Callable[[str, str], StreamRecord]
"""Opens the record of a request; takes the names of its model and protocol."""


def no_record(model: str, protocol: str) -> StreamRecord:
    """Open a record that measures nothing."""
    return StreamRecord()


@contextmanager
def measure(record: StreamRecord) -> Iterator[StreamRecord]:
    """Measure a generation from here to the end of the context. The generator itself observes each of its events. Only
    a failure is noted as such: without one and without a last event, the client has disconnected."""
    try:
        yield record
    except Exception as error:
        record.fail(error)
        raise
    finally:
        record.close()


def check_complete(end: TextEvent) -> None:
    """Raise SluiceError UNAVAILABLE for a last event with which the engine ended a generation before its end."""
    if end.finish_reason in ENDED_EARLY:
        raise SluiceError(ErrorCode.UNAVAILABLE, "the engine ended the request before it was complete")


def timed_feed(feed: Feed) -> Feed:
    """Return `feed`, with its time added up in the current span; `feed` itself where nobody records."""
    here = current_span.get()
    if here is None:
        return feed
    spent_ns = 0

    def feed_timed(token_event: TokenEvent) -> TextEvent | None:
        nonlocal spent_ns
        began_ns = perf_counter_ns()
        event = feed(token_event)
        spent_ns += perf_counter_ns() - began_ns
        if event is not None and event.finish_reason is not None:
            here.attributes[DETOKENIZE_MS] = round(spent_ns / _NS_PER_MS, 3)
        return event

    return feed_timed


class OpenTexts:
    """Counts the generations that are open: each enters this context when it starts and leaves it at its end."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until none is open."""
        await self._idle.wait()


async def give(consumer: Consumer[T], event: T) -> None:
    """Have a consumer take an event, and wait until it is ready for the next one."""
    if not consumer.take(event):
        await consumer.ready()


class Called(Generic[T]):
    """Calls a function with each event, and is always ready."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[T], object]) -> None:
        self._function = function

    def take(self, event: T) -> bool:
        self._function(event)
        return True

    async def ready(self) -> None: ...


class Mapped(Generic[T, U]):
    """Passes on what a function makes of each event."""

    __slots__ = ("_make", "_pass_on", "ready")

    def __init__(self, make: Callable[[T], U], consumer: Consumer[U]) -> None:
        self._make = make
        self._pass_on = consumer.take
        self.ready = consumer.ready

    def take(self, event: T) -> bool:
        return self._pass_on(self._make(event))


class Expanded(Generic[T, U]):
    """Passes on the events that a function makes of each event, one after the other."""

    def __init__(self, make: Callable[[T], Iterable[U]], consumer: Consumer[U]) -> None:
        self._make = make
        self._consumer = consumer
        self._held: deque[U] = deque()

    def take(self, event: T) -> bool:
        self._held += self._make(event)
        return self._pass_held()

    async def ready(self) -> None:
        await self._consumer.ready()
        while not self._pass_held():
            await self._consumer.ready()

    def _pass_held(self) -> bool:
        while self._held:
            if not self._consumer.take(self._held.popleft()):
                return False
        return True


class TextEvents:
    """Passes on the text of one generation's token events, the first one with what belongs to the prompt."""

    def __init__(
        self,
        feed: Feed,
        record: StreamRecord,
        consumer: Consumer[TextEvent],
        *,
        prompt_end: str = "",
        echo: PromptEcho | None = None,
        is_echo_alone: bool = False,
        on_detail: ObserveDetail | None = None,
        on_end: Callable[[int, int], None] | None = None,
        watch: PromptWatch | None = None,
    ) -> None:
        """`feed` makes text events of token events. `on_detail` gets the details of the engine's events before the
        text event that they lead to. `on_end` gets the numbers of tokens of the prompt and of a complete text.
        `is_echo_alone`: the text is the prompt. `watch` finds out why the prompt was not cached."""
        self.stop_generation: Callable[[], None]
        """Called when the text ends, which may be before the engine ends it."""
        self._feed = feed
        self._observe = record.observe
        self._pass_on = consumer.take
        self.ready = consumer.ready
        self._prompt_end = prompt_end
        self._echo = echo
        self._is_echo_alone = is_echo_alone
        self._on_detail = on_detail
        self._on_end = on_end
        self._watch = watch
        self._miss: CacheMiss | None = None
        self._has_told_miss = False

    def take(self, token_event: TokenEvent) -> bool:
        if token_event.detail is not None and self._on_detail is not None:
            self._on_detail(token_event.detail)
        if self._watch is not None and token_event.detail is not None:
            self._explain(self._watch, token_event.detail)
        event = self._feed(token_event)
        if event is None:
            return True
        if self._miss is not None and (not self._has_told_miss or event.finish_reason is not None):
            event, self._has_told_miss = with_cache_miss(event, self._miss), True
        if self._prompt_end or self._echo:
            event = self._with_prompt(event)
        if event.finish_reason is not None:
            self.stop_generation()
            check_complete(event)
            if self._on_end is not None:
                self._on_end(event.prompt_tokens, event.completion_tokens)
        self._observe(event)
        return self._pass_on(event)

    def _explain(self, watch: PromptWatch, detail: EventDetail) -> None:
        if detail.num_cached_tokens is not None:
            self._miss, self._watch = watch.explain(detail), None

    def _with_prompt(self, event: TextEvent) -> TextEvent:
        prompt_end, self._prompt_end = self._prompt_end, ""
        echo, self._echo = self._echo, None
        if prompt_end:
            event = with_prompt_end(event, prompt_end)
        if echo is None:
            return event
        return echo.alone(event) if self._is_echo_alone else echo.prepend_to(event)
