"""The measurements of one request to a language model, from when the service took it to its end."""

import time
from collections.abc import Callable
from math import inf
from typing import Protocol

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError
from sluice.gateway.calls import Call, current_call, current_identity, note_model
from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.telemetry.tallies import RequestTally
from sluice.pipelines.text.stream import SharedPrompt, current_prompt
from sluice.pipelines.text.types import TextEvent
from sluice.record.histogram import Histogram
from sluice.record.spans import Attributes, RemoteParent, Span, current_span, remote_parent

_SERVER_FAULTS = {*CANNOT_SERVE, ErrorCode.INTERNAL, ErrorCode.UNKNOWN}
"""Outcomes of requests that were no fault of the client: they are no goodput."""
_ERROR = "error"
WAITING, RUNNING = "waiting", "running"
"""States of a request with an adapter: without a token yet, and with one."""
_CHATS = ("chat", "anthropic", "messages", "responses")
"""Parts of the protocols' names whose requests are conversations."""


Exemplar = dict[str, str]
"""The labels that name the span of a sampled trace: a trace that nobody keeps leads nowhere."""


class AdapterCounts(Protocol):
    """Counts the open requests of LoRA adapters."""

    def move(self, model: str, adapter: str, before: str, now: str) -> None:
        """Note that a request has gone from one state to another; "" is before its begin and after its end."""


class SharedPart:
    """The part of a request with several generations that one tally counts: once, and each of its prompts once, as the
    client's `usage` does. The generations of a prompt have prompts of equal length; those of a pipeline's other steps
    have prompts of their own."""

    __slots__ = (
        "_admitted",
        "_cached",
        "_call",
        "_call_outcome",
        "_exemplar",
        "_finish",
        "_last",
        "_lengths",
        "_missed",
        "_outcome",
        "_started",
        "_tally",
    )

    def __init__(self, tally: RequestTally, call: Call | None, started: float, exemplar: Exemplar | None) -> None:
        self._tally = tally
        self._call = call
        self._started = self._last = started
        self._exemplar = exemplar
        self._admitted: set[tuple[int, int]] = set()
        """Prompts that were admitted, by their index and their number of tokens."""
        self._cached: dict[tuple[int, int], int] = {}
        """The tokens of each counted prompt that a cache had when it was computed first."""
        self._lengths: set[tuple[int, int]] = set()
        self._outcome = self._call_outcome = ""
        self._finish = ""
        self._missed: set[str] | None = None
        tally.num_open += 1
        if call is not None:
            call.hold()

    def admit(self, index: int, num_tokens: int) -> int:
        """Return how many tokens of a prompt are still to be admitted."""
        if (index, num_tokens) in self._admitted:
            return 0
        self._admitted.add((index, num_tokens))
        return num_tokens

    def count_prompt(self, index: int, num_tokens: int, num_cached: int) -> tuple[int, int]:
        """Return what a generation adds to the tokens of prompts, and to those of them that were cached: the other
        generations of a prompt find what the first one computed."""
        key = index, num_tokens
        known = self._cached.get(key)
        self._cached[key] = num_cached if known is None else min(known, num_cached)
        return (num_tokens, num_cached) if known is None else (0, self._cached[key] - known)

    def has_counted_length(self, index: int, num_tokens: int) -> bool:
        """Whether an answer to the prompt has ended before."""
        before = len(self._lengths)
        self._lengths.add((index, num_tokens))
        return len(self._lengths) == before

    def end_generation(
        self, outcome: str, finish: str, now: float, missed: list[str] | None, *, is_calls: bool
    ) -> None:
        """Note the end of a generation: one that failed decides how the request ends, before one that was cancelled.
        `missed` None: it says nothing of speed. `is_calls`: its end is one of the call's."""
        self._last = now
        self._outcome = _worse(self._outcome, outcome)
        if is_calls:
            self._call_outcome = _worse(self._call_outcome, outcome)
        if outcome == self._outcome:
            self._finish = finish
        if missed is not None:
            self._missed = (self._missed or set()).union(missed)

    def close(self) -> None:
        """Count the request. Its generations have ended."""
        tally = self._tally
        tally.num_open -= 1
        tally.cached_tokens += sum(self._cached.values())
        if self._outcome:  # at least one generation began
            _count_end(tally, self._outcome, self._finish, self._last - self._started, self._exemplar)
        if self._missed is not None:
            tally.judge(sorted(self._missed))
        if self._call is not None:
            if self._call_outcome not in ("", "ok"):
                self._call.finish = self._call_outcome
            self._call.release()


def _find_exemplar(parent: RemoteParent | None) -> Exemplar | None:
    if parent is None or not parent.is_sampled:
        return None
    return {"trace_id": f"{parent.trace_id:032x}", "span_id": f"{parent.span_id:016x}"}


def _worse(one: str, other: str) -> str:
    """Return the outcome of two that says more: the first failure, else that it was cancelled, else that it is ok."""
    return min((each for each in (one, other) if each), key=lambda each: {"cancelled": 1, "ok": 2}.get(each, 0))


def _count_end(tally: RequestTally, outcome: str, finish: str, seconds: float, exemplar: Exemplar | None) -> None:
    """Count the end of a request that took so long."""
    _observe(tally.request_duration, seconds, exemplar)
    tally.outcomes[outcome] += 1
    tally.finishes[finish] += 1
    if outcome != "ok":
        tally.add_failure(outcome, seconds)


def _observe(histogram: Histogram, value: float, exemplar: Exemplar | None) -> None:
    if exemplar is not None:
        histogram.add_traced(value, exemplar, time.time())
    else:
        histogram.add(value)


class RequestRecord:
    """Writes to the tally of its model and protocol, and to the call that the request is a part of. A generation of a
    shared request leaves to the request's part what is counted once."""

    __slots__ = (
        "_adapter",
        "_adapters",
        "_admitted",
        "_cached_tokens",
        "_call",
        "_clock",
        "_exemplar",
        "_finish",
        "_first_at",
        "_itl_target",
        "_last",
        "_model",
        "_num_gaps",
        "_num_slow_gaps",
        "_outcome",
        "_output_tokens",
        "_part",
        "_prompt",
        "_prompt_tokens",
        "_span",
        "_started",
        "_tally",
        "_targets",
        "_tpot_s",
    )

    def __init__(
        self,
        tally: RequestTally,
        model: str,
        protocol: str,
        clock: Callable[[], float],
        targets: GoodputTargets | None,
        adapters: AdapterCounts,
    ) -> None:
        self._tally = tally
        self._model = model
        self._clock = clock
        self._targets = targets
        self._itl_target = inf if targets is None else targets.itl
        self._adapters = adapters
        self._adapter = ""
        self._started = self._clock()
        self._first_at = 0.0
        self._last = 0.0
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._num_gaps = self._num_slow_gaps = 0
        self._tpot_s: float | None = None
        self._outcome = "cancelled"
        self._finish = ""
        self._exemplar = _find_exemplar(remote_parent.get())
        self._admitted = (0, 0)
        """Tokens of the prompt and of the answer that the observers have admitted."""
        call = current_call.get()
        self._call = None if call is None or call.ended else call
        if self._call is not None:
            self._call.hold()
        self._prompt = 0
        self._part: SharedPart | None = None
        shared = current_prompt.get()
        if shared is None:
            tally.num_open += 1
        else:
            self._prompt, self._part = shared.index, self._join(shared)
        self._span = _begin_span(model, protocol)

    def _join(self, shared: SharedPrompt) -> SharedPart:
        """Return the part of a shared request that counts in this tally."""
        part = shared.parts.get(self._tally)
        if not isinstance(part, SharedPart):
            part = shared.parts[self._tally] = SharedPart(self._tally, self._call, self._started, self._exemplar)
        return part

    async def admit(self, prompt_tokens: int, max_tokens: int, adapter: str = "") -> float | None:
        """Ask the observers of the current call, and return its sender's weight. Raises SluiceError where one refuses
        the generation, and FORBIDDEN for an adapter that the sender may not use."""
        call = self._call
        if call is not None:
            if adapter:
                note_model(call.model, adapter, is_checked=not call.route)  # targets need no right of their own
            if self._part is not None:
                prompt_tokens = self._part.admit(self._prompt, prompt_tokens)
            await call.admit(prompt_tokens, max_tokens)
            self._admitted = (prompt_tokens, max_tokens)
        self._tally.max_tokens.add(max_tokens)
        if adapter and not self._adapter:
            self._adapter = adapter
            self._adapters.move(self._model, adapter, "", WAITING)
        return None if call is None or call.identity is None else call.identity.weight

    def observe(self, event: TextEvent) -> None:
        """Count an event that is about to go to the client."""
        now = self._clock()
        tally = self._tally
        if self._last:
            gap = now - self._last
            tally.inter_token_latency.add(gap)
            self._num_gaps += 1
            if gap > self._itl_target:
                self._num_slow_gaps += 1
        else:
            self._first(now, event)
        self._last = now
        tally.generation_tokens += event.num_tokens
        self._output_tokens += event.num_tokens
        if self._call is not None:
            self._call.generated_tokens += event.num_tokens
        if event.finish_reason is not None:
            self._end(now, event)

    def _first(self, now: float, event: TextEvent) -> None:
        self._first_at = now
        if self._call is not None:
            self._call.first_token = self._call.first_token or now
        if self._adapter:
            self._adapters.move(self._model, self._adapter, WAITING, RUNNING)
        self._count_prompt(event)
        self._observe(self._tally.time_to_first_token, now - self._started)

    def _end(self, now: float, event: TextEvent) -> None:
        """Count the last event, which has a finish reason."""
        assert event.finish_reason is not None
        self._outcome = "ok"
        self._finish = event.finish_reason.value
        if self._span is not None:
            _note_answer(self._span, event)
        self._count_prompt(event)
        tally = self._tally
        if self._call is not None:
            self._call.finish = self._finish
        if event.completion_tokens > 1 and now > self._first_at:
            self._tpot_s = (now - self._first_at) / (event.completion_tokens - 1)
            self._observe(tally.time_per_output_token, self._tpot_s)
        self._observe(tally.decode_duration, now - self._first_at)
        if self._part is None or not self._part.has_counted_length(self._prompt, event.prompt_tokens):
            tally.prompt_length.add(event.prompt_tokens)
        tally.output_length.add(event.completion_tokens)

    def _observe(self, histogram: Histogram, value: float) -> None:
        _observe(histogram, value, self._exemplar)

    def _count_prompt(self, event: TextEvent) -> None:
        """Count the prompt with the first event and the last: remote models report its tokens at the end."""
        tokens, cached = event.prompt_tokens - self._prompt_tokens, event.cached_tokens - self._cached_tokens
        if not (tokens or cached):
            return
        self._prompt_tokens, self._cached_tokens = event.prompt_tokens, event.cached_tokens
        if self._part is not None:
            tokens, cached = self._part.count_prompt(self._prompt, event.prompt_tokens, event.cached_tokens)
        else:
            self._tally.cached_tokens += cached
        self._tally.prompt_tokens += tokens
        if self._call is not None:
            self._call.prompt_tokens += tokens
            self._call.cached_tokens += cached

    def fail(self, error: Exception) -> None:
        code = error.code if isinstance(error, SluiceError) else ErrorCode.INTERNAL
        self._outcome = code.value
        if self._span is not None:
            self._span.error = str(error) or code.value
            self._span.attributes["error.type"] = code.value

    def close(self) -> None:
        """End the request; without a finish reason or a failure, its client has disconnected."""
        now, tally = self._clock(), self._tally
        if self._span is not None:
            _end_span(self._span, self._outcome)
        if self._outcome != "ok":
            tally.aborted_tokens += self._output_tokens
        if self._adapter:
            self._adapters.move(self._model, self._adapter, RUNNING if self._first_at else WAITING, "")
        missed, finish = self._judge(now), self._finish_reason()
        if self._part is not None:
            self._part.end_generation(self._outcome, finish, now, missed, is_calls=not self._is_left_to_others)
        else:
            tally.num_open -= 1
            _count_end(tally, self._outcome, finish, now - self._started, self._exemplar)
            if missed is not None:
                tally.judge(missed)
        self._release_call()

    def _finish_reason(self) -> str:
        if self._outcome == "ok":
            return self._finish
        return self._outcome if self._outcome == "cancelled" else _ERROR

    def _judge(self, now: float) -> list[str] | None:
        """Return the targets that were missed; None without targets, and for a request that its client gave up, or that
        was invalid: it says nothing of speed."""
        targets = self._targets
        if targets is not None and self._outcome == "ok":
            ttft_s, e2e_s = self._first_at - self._started, now - self._started
            return targets.missed(ttft_s, e2e_s, self._num_gaps, self._num_slow_gaps, self._tpot_s)
        return [_ERROR] if targets is not None and self._outcome in _SERVER_FAULTS else None

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another target of the call's route may answer."""
        return self._call is not None and bool(self._call.route) and not self._first_at

    def _release_call(self) -> None:
        call = self._call
        if call is not None:
            if self._is_left_to_others:
                self._leave_to_others(call)
            elif self._outcome != "ok" and self._part is None:
                call.finish = self._outcome
            call.release()

    def _leave_to_others(self, call: Call) -> None:
        """End a target's part in a call that names a route: what was admitted is there for the target that is asked
        next, and one that has answered before says how the call ends."""
        call.spare = (call.spare[0] + self._admitted[0], call.spare[1] + self._admitted[1])
        if not call.first_token:
            call.finish = self._outcome


# -- spans, with attributes by OpenTelemetry's conventions for generative AI


def _begin_span(model: str, protocol: str) -> Span | None:
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


def _note_answer(span: Span, end: TextEvent) -> None:
    """Note what the last event of an answer says."""
    assert end.finish_reason is not None
    span.attributes |= {
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.output_tokens": end.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
        "gen_ai.response.finish_reasons": (end.finish_reason.value,),
    }


def _end_span(span: Span, outcome: str) -> None:
    """End the span, and what is open within it; `outcome` is `ok`, `cancelled` or an error code."""
    span.attributes["sluice.outcome"] = outcome
    span.end_all()
    if current_span.get() is span:
        current_span.set(span.parent)
