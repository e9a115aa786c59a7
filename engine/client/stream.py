"""The stream of one submitted request: it pushes its token events to one consumer, and notes where their time went."""

import asyncio
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import Protocol, Self, TypeVar

from sluice.engine.client.supervision import Clock, Standing, build_resumed_request
from sluice.engine.types import (
    BlockSource,
    EventDetail,
    Eviction,
    FinishReason,
    GenerateRequest,
    RequestFailed,
    SequenceMetrics,
    SequenceTiming,
    TokenEvent,
    TokenLogprob,
)
from sluice.errors import SluiceError
from sluice.record.spans import Span, current_span

EventT = TypeVar("EventT", contravariant=True)
_NS_PER_S = 1_000_000_000


class Consumer(Protocol[EventT]):
    """Takes the events of one stream, in order. From the engine's frame to the client's connection an event passes one
    consumer after the other, each by a plain call. Errors go the other way: whoever generates raises them."""

    def take(self, event: EventT) -> bool:
        """Take an event. Returns False where `ready` must be awaited before the next one."""
        ...

    async def ready(self) -> None:
        """Wait until the consumer can take the next event. The task that generates calls it."""
        ...


class EventRelay:
    """Has streams hand on the events of a step in one go at the end of the event loop's turn: waking a task for each
    stream costs more than its text. Frames that came meanwhile are merged by then."""

    def __init__(self) -> None:
        self._due: list[GenerationStream] = []

    def add(self, stream: "GenerationStream") -> None:
        """Have a stream hand on its events."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._hand_on)
        self._due.append(stream)

    def _hand_on(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.hand_on()


class GenerationSpans:
    """The spans of one generation: queue, prefill and decode. An engine tells durations, so that its clock need not be
    this process's."""

    __slots__ = ("_base_ns", "_decode", "_is_resumed", "_span")

    def __init__(self, span: Span, request: GenerateRequest) -> None:
        """`span` is the one that the generation works for. It gets the request's parameters."""
        self._span = span
        self._decode: Span | None = None
        self._base_ns = 0
        """When the engine got it, by the clock of this process."""
        self._is_resumed = False
        sampling = request.sampling
        span.attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        if sampling.top_k:
            span.attributes["gen_ai.request.top_k"] = float(sampling.top_k)

    def take(self, timing: SequenceTiming, num_cached_tokens: int | None) -> None:
        """Note what an event says, which has just come."""
        now = perf_counter_ns()
        if self._decode is None or self._is_resumed:
            self._begin_decode(timing, num_cached_tokens, now)
        for start, end in timing.pauses:
            self._note_pause(self._at(start), self._at(end))

    def _begin_decode(self, timing: SequenceTiming, num_cached_tokens: int | None, now: int) -> None:
        self._base_ns = now - round(timing.age_s * _NS_PER_S)
        admitted_ns = self._at(timing.queue_s)
        self._span.child("queue", started_ns=self._base_ns).end(admitted_ns)
        prefill = self._span.child("prefill", {"sluice.cached_tokens": num_cached_tokens or 0}, admitted_ns)
        for start, end, num_tokens in timing.chunks if len(timing.chunks) > 1 else ():
            prefill.child("prefill_chunk", {"sluice.tokens": num_tokens}, self._at(start)).end(self._at(end))
        prefill.end(now)
        if self._decode is None:
            self._span.note("first_token", at_ns=now)
            self._decode = self._span.child("decode", started_ns=now)
        self._is_resumed = False

    def _at(self, seconds: float) -> int:
        return self._base_ns + round(seconds * _NS_PER_S)

    def _note_pause(self, start_ns: int, end_ns: int) -> None:
        above = self._decode or self._span
        above.note("preempted", at_ns=start_ns)
        above.note("resumed", at_ns=end_ns)
        above.child("paused", started_ns=start_ns).end(end_ns)

    def note_lost(self) -> None:
        """Note that the engine is lost, which has the generation."""
        (self._decode or self._span).note("engine_lost")

    def note_resumed(self) -> None:
        """Note that another engine gets it."""
        (self._decode or self._span).note("resubmitted")
        self._is_resumed = True

    def end(self) -> None:
        """Note that nothing more comes."""
        if self._decode is not None:
            self._decode.end()


class GenerationStream:
    """The events of one stream, for one consumer on one event loop: `pass_to` pushes them, and iterating pulls them.
    Events that wait for the consumer are merged into one, so a slow one costs neither memory per event nor time of a
    step. The size is bounded by the request's max_tokens. All tokens are kept until the end, because an engine that
    replaces a lost one needs them."""

    def __init__(
        self,
        stream_id: int,
        request: GenerateRequest,
        cancel: Callable[[int], None],
        relay: EventRelay | None = None,
        clock: Clock = perf_counter,
    ) -> None:
        """`relay` is shared by the streams of an engine; without one events are handed on at once."""
        self.stream_id = stream_id
        self.request = request
        self.output_token_ids: list[int] = []
        """All tokens so far, taken or not."""
        self._clock = clock
        self.submitted_at = clock()
        self.spans = None if (span := current_span.get()) is None else GenerationSpans(span, request)
        """Where its time is noted; None where nobody records."""
        self.was_sent = False
        """Whether it was sent to an engine, this one or a lost one."""
        self.was_delayed = False
        """Whether it may have waited in the client, so that the engine gets only the time that is left."""
        self.has_started = False
        """Whether an engine is known to have begun it, so that its queue timeout no longer applies."""
        self.most_wait_s: float | None = None
        """The predicted wait over which an engine is to refuse it (`Submit.most_wait_s`)."""
        self.refusals: dict[str, RequestFailed] = {}
        """The latest refusal of each replica that could not admit it soon enough, or at all, by the replica's name."""
        self.source: BlockSource | None = None
        """The engine that has computed blocks of its prompt."""
        self.on_move: Callable[[Standing], None] | None = None
        """Called, and the stream is given up, where it would go on in another engine; None for one that may."""
        self._cancel = cancel
        self._num_taken = 0
        self._has_cached_tokens = self._has_prompt_logprobs = False
        """Whether the details that come once were received, so that those of a replacing engine are ignored."""
        self._num_cached_tokens: int | None = None
        self._evicted: Eviction | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._logprobs: list[TokenLogprob] | None = None
        self._metrics: SequenceMetrics | None = None
        self._num_prompt_tokens: int | None = None
        self._has_detail = False
        """Whether the consumer has yet to take any of the above, or of the logits below."""
        self._context_logits: bytes | None = None
        self._generation_logits: list[bytes] = []
        self._handover: bytes | None = None
        self._finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._relay = relay
        self._consumer: Consumer[TokenEvent] | None = None
        self._is_ready = True
        """Whether the consumer can take the next event."""
        self._is_due = False
        """Whether the relay is about to have the stream hand on its events."""
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """Return the next event. Raises as `pass_to`."""
        while not self._has_news():
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        return self._next()

    async def pass_to(self, consumer: Consumer[TokenEvent]) -> None:
        """Push all events to `consumer`, up to the last one or until `stop`. Raises SluiceError if the engine rejected
        or failed the request, and what the consumer raises."""
        self._consumer = consumer
        try:
            while not self._is_over:
                self.hand_on()
                if not self._is_ready:
                    await consumer.ready()
                    self._is_ready = True
                elif not self._is_over and not self._has_news():
                    await self._wait()
        finally:
            self._consumer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def hand_on(self) -> None:
        """Give the consumer what it has not taken yet, once it is ready for that."""
        self._is_due = False
        if self._consumer is not None and self._is_ready and self._has_news():
            try:
                self._is_ready = self._consumer.take(self._next())
            except Exception as error:
                self._error, self._is_over = error, True
            if self._is_ready and not self._is_over and self._error is None:
                return
        self._wake()

    def stop(self) -> None:
        """End the stream before the engine does: cancel the request, and hand on nothing more."""
        self._is_over, self._error = True, None
        self.cancel()

    def _has_news(self) -> bool:
        has_some = self._num_taken < len(self.output_token_ids) or self._finish_reason or self._error
        return bool(has_some) and not self._is_over

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _next(self) -> TokenEvent:
        """Return all that waits as one event. Raises the error after the last tokens."""
        token_ids = self.output_token_ids[self._num_taken :]
        if not token_ids and self._error is not None:
            error, self._error, self._is_over = self._error, None, True
            raise error
        self._num_taken += len(token_ids)
        detail = self._take_detail() if self._has_detail else None
        event = TokenEvent(self.stream_id, token_ids, self._finish_reason, detail)
        if self._finish_reason is not None:
            self._finish_reason, self._is_over = None, True
        return event

    def _take_detail(self) -> EventDetail:
        detail = EventDetail(
            self._num_cached_tokens,
            self._logprobs,
            self._prompt_logprobs,
            self._metrics,
            self._context_logits,
            b"".join(self._generation_logits) or None,
            self._num_prompt_tokens,
            handover=self._handover,
            evicted=self._evicted,
        )
        self._num_cached_tokens = self._evicted = self._prompt_logprobs = self._logprobs = None
        self._metrics = self._context_logits = None
        self._generation_logits = []
        self._has_detail = False
        return detail

    def cancel(self) -> None:
        """Cancel the request. Idempotent and legal in every state, also after the end."""
        self._cancel(self.stream_id)

    def take_source(self) -> BlockSource | None:
        """Return `source` for an engine that gets the request now. What was handed over is good for one alone: another
        one computes the prompt."""
        source = self.source
        if source is not None and source.handover:
            self.source = None
        return source

    def request_now(self) -> GenerateRequest:
        """Return the request for an engine that gets it now. Raises DEADLINE if no time is left."""
        if not self.was_delayed:
            return self.request
        elapsed_s = self._clock() - self.submitted_at
        return build_resumed_request(self.request, self.output_token_ids, elapsed_s, self.has_started)

    def move(self, stream_id: int, cancel: Callable[[int], None]) -> None:
        """Go on in another engine, under another number, where `cancel` is its client's."""
        self.stream_id, self._cancel = stream_id, cancel

    def push(self, event: TokenEvent) -> None:
        """Add an event. Called by the client on the consumer's event loop."""
        if event.detail is not None:
            self._merge_detail(event.detail)
        self.output_token_ids += event.token_ids
        self._finish_reason = event.finish_reason
        if self.spans is not None and event.finish_reason is not None:
            self.spans.end()
        if self._consumer is None or self._relay is None:
            self.hand_on()
        elif not self._is_due:
            self._is_due = True
            self._relay.add(self)

    def _merge_detail(self, detail: EventDetail) -> None:
        self._has_detail = True
        if detail.num_cached_tokens is not None and not self._has_cached_tokens:
            self._num_cached_tokens, self._has_cached_tokens = detail.num_cached_tokens, True
            self._evicted = detail.evicted
        if detail.prompt_logprobs is not None and not self._has_prompt_logprobs:
            self._prompt_logprobs, self._has_prompt_logprobs = detail.prompt_logprobs, True
        if detail.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += detail.logprobs
        if detail.metrics is not None:
            self._metrics = detail.metrics
        if detail.num_prompt_tokens is not None:
            self._num_prompt_tokens = detail.num_prompt_tokens
        if detail.timing is not None and self.spans is not None:
            self.spans.take(detail.timing, detail.num_cached_tokens)
        if detail.context_logits is not None:
            self._context_logits = detail.context_logits
        if detail.generation_logits is not None:
            self._generation_logits.append(detail.generation_logits)
        if detail.handover is not None:
            self._handover = detail.handover

    def fail(self, error: SluiceError) -> None:
        """End the stream with `error`, after the tokens that the consumer has not taken yet."""
        self._error = error
        if self.spans is not None:
            self.spans.end()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PrefillCount:
    """Sums the tokens of prompts that are still to be computed, over streams."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._by_stream: dict[int, int] = {}

    def add(self, stream_id: int, num_tokens: int) -> None:
        """Count the tokens of a stream that was sent."""
        self._by_stream[stream_id] = num_tokens
        self.num_tokens += num_tokens

    def remove(self, stream_id: int) -> None:
        """Count them no more; no error where they are not counted."""
        self.num_tokens -= self._by_stream.pop(stream_id, 0)
