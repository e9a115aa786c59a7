"""The measurements of a request to a language model, from when the service took it to its end, and their sums."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError
from sluice.gateway.calls import Call, current_call, note_model
from sluice.gateway.options.goodput import GoodputTargets
from sluice.gateway.telemetry.tracer import begin_generation, end_generation, note_answer
from sluice.pipelines.text.sessions import FindReplica, PromptWatch, SessionTable, SessionUse
from sluice.pipelines.text.stream import SharedPrompt, StreamRecord, current_prompt
from sluice.pipelines.text.types import EncodedPrompt, TextEvent, TextRequest
from sluice.record.histogram import Histogram
from sluice.record.spans import RemoteParent, Span, remote_parent

_SERVER_FAULTS = {*CANNOT_SERVE, ErrorCode.INTERNAL, ErrorCode.UNKNOWN}
"""Outcomes of requests that were no fault of the client: they are no goodput."""
_ERROR = "error"
WAITING, RUNNING = "waiting", "running"
"""States of a request with an adapter: without a token yet, and with one."""
OTHER = "other"
"""The name of models and adapters that are too many to be named."""
MAX_ADAPTERS = 100
"""Most adapters that labels name: those that came first. Their names may come from clients."""

TTFT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
ITL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000),
    *(100_000, 200_000, 1_000_000),
)
MET, MISSED = "met", "missed"

Exemplar = dict[str, str]
"""The labels that name the span of a sampled trace: a trace that nobody keeps leads nowhere."""


@dataclass(slots=True, eq=False)
class RequestTally:
    """Open requests, outcomes, tokens and distributions, as plain numbers. Belongs to the event loop."""

    num_open: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of prompts that a cache had."""
    aborted_tokens: int = 0
    """Tokens that were sent of answers that did not end by themselves."""
    outcomes: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    """Ended requests by outcome; by finish reason."""
    goodput: Counter[str] = field(default_factory=lambda: Counter({MET: 0, MISSED: 0}))
    misses: Counter[str] = field(default_factory=Counter)
    """Requests by whether they met all targets, shown from 0 on as rates need it; by target that they missed."""
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, TTFT_BUCKETS_S))
    time_per_output_token: Histogram = field(default_factory=partial(Histogram, TPOT_BUCKETS_S))
    request_duration: Histogram = field(default_factory=partial(Histogram, DURATION_BUCKETS_S))
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, ITL_BUCKETS_S))
    decode_duration: Histogram = field(default_factory=partial(Histogram, DURATION_BUCKETS_S))
    prompt_length: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    output_length: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    max_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    failed_durations: dict[str, Histogram] = field(default_factory=dict)
    """Durations of the requests that did not end by themselves, by outcome; they are in `request_duration` too."""

    def end(self, outcome: str, finish: str, seconds: float, exemplar: Exemplar | None) -> None:
        """Count the end of a request that took so long."""
        self.request_duration.add_traced(seconds, exemplar)
        self.outcomes[outcome] += 1
        self.finishes[finish] += 1
        if outcome != "ok":
            self.failed_durations.setdefault(outcome, Histogram(DURATION_BUCKETS_S)).add(seconds)

    def judge(self, missed: list[str]) -> None:
        """Count a request by the targets that it missed."""
        self.goodput[MISSED if missed else MET] += 1
        self.misses.update(missed)


class OpenAdapters:
    """The open requests of each LoRA adapter, by whether they have a token yet."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        """By model, adapter and state."""
        self._names: set[tuple[str, str]] = set()

    def move(self, model: str, adapter: str, before: str, now: str) -> None:
        """Note that a request has gone from one state to another; "" is before its begin and after its end."""
        if len(self._names) < MAX_ADAPTERS:
            self._names.add((model, adapter))
        name = adapter if (model, adapter) in self._names else OTHER
        for state, change in ((before, -1), (now, 1)):
            if state:
                self.counts[model, name, state] += change


@dataclass(slots=True, eq=False)
class SharedPart:
    """The part of a request with several generations that one tally counts: once, and each of its prompts once, as the
    client's `usage` does. The generations of a prompt have prompts of equal length; those of a pipeline's other steps
    have prompts of their own."""

    _tally: RequestTally
    _call: Call | None
    _started: float
    _exemplar: Exemplar | None
    _last: float = 0.0
    _seen: set[tuple[str, int, int]] = field(default_factory=set)
    """The counts made so far: their kind, the prompt's index and its number of tokens."""
    _cached: dict[tuple[int, int], int] = field(default_factory=dict)
    """The tokens of each counted prompt that a cache had when it was computed first."""
    _outcome: str = ""
    _call_outcome: str = ""
    _finish: str = ""
    _missed: set[str] | None = None

    def __post_init__(self) -> None:
        self._last = self._started
        self._tally.num_open += 1
        if self._call is not None:
            self._call.hold()

    def is_first(self, what: str, index: int, num_tokens: int) -> bool:
        """Whether a prompt does for the first time what it does with each of its generations."""
        before = len(self._seen)
        self._seen.add((what, index, num_tokens))
        return len(self._seen) > before

    def count_prompt(self, index: int, num_tokens: int, num_cached: int) -> tuple[int, int]:
        """Return what a generation adds to the tokens of prompts, and to those of them that were cached: the other
        generations of a prompt find what the first one computed."""
        key = index, num_tokens
        known = self._cached.get(key)
        self._cached[key] = num_cached if known is None else min(known, num_cached)
        return (num_tokens, num_cached) if known is None else (0, self._cached[key] - known)

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
            tally.end(self._outcome, self._finish, self._last - self._started, self._exemplar)
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


@dataclass(slots=True, eq=False)
class RequestRecord(StreamRecord):
    """Writes to the tally of its model and protocol, and to the call that the request is a part of. A generation of a
    shared request leaves to the request's part what is counted once."""

    _tally: RequestTally
    _model: str
    _protocol: str
    _clock: Callable[[], float]
    _targets: GoodputTargets | None
    _adapters: OpenAdapters
    _sessions: SessionTable
    _adapter: str = ""
    _started: float = 0.0
    _first_at: float = 0.0
    _last: float = 0.0
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _output_tokens: int = 0
    _own_tokens: int = 0
    """Tokens of the prompt that this generation adds to those of its request."""
    _own_cached_tokens: int = 0
    _num_gaps: int = 0
    _num_slow_gaps: int = 0
    _itl_target: float = inf
    _tpot_s: float | None = None
    _outcome: str = "cancelled"
    _finish: str = ""
    _exemplar: Exemplar | None = None
    _admitted: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the answer that the observers have admitted."""
    _call: Call | None = None
    _prompt: int = 0
    _part: SharedPart | None = None
    _span: Span | None = None
    _use: SessionUse | None = None

    def __post_init__(self) -> None:
        self._started = self._clock()
        if self._targets is not None:
            self._itl_target = self._targets.itl
        self._exemplar = _find_exemplar(remote_parent.get())
        call = current_call.get()
        if call is not None and not call.ended:
            self._call = call
            call.hold()
        shared = current_prompt.get()
        if shared is None:
            self._tally.num_open += 1
        else:
            self._prompt, self._part = shared.index, self._join(shared)
        self._span = begin_generation(self._model, self._protocol)

    def _join(self, shared: SharedPrompt) -> SharedPart:
        """Return the part of a shared request that counts in this tally."""
        part = shared.parts.get(self._tally)
        if not isinstance(part, SharedPart):
            part = shared.parts[self._tally] = SharedPart(self._tally, self._call, self._started, self._exemplar)
            shared.at_end.callback(part.close)
        return part

    def watch(
        self, key: str, model: str, request: TextRequest, prompt: EncodedPrompt, block_size: int, replica: FindReplica
    ) -> PromptWatch | None:
        """Count a turn of the session, and watch its prompt; of a request with several, the first one."""
        if self._part is not None and (self._prompt or not self._part.is_first("turn", self._prompt, 0)):
            self._use = self._sessions.find(key)
            return None
        self._use = self._sessions.open(key, request, model)
        return PromptWatch(self._sessions, self._use, request, prompt, model, block_size, replica)

    async def admit(self, prompt_tokens: int, max_tokens: int, adapter: str = "") -> float | None:
        """Ask the observers of the current call, and return its sender's weight. Raises SluiceError where one refuses
        the generation, and FORBIDDEN for an adapter that the sender may not use."""
        call = self._call
        if call is not None:
            if adapter:
                note_model(call.model, adapter, is_checked=not call.route)  # targets need no right of their own
            if self._part is not None and not self._part.is_first("admit", self._prompt, prompt_tokens):
                prompt_tokens = 0
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
        if event.finish_reason is not None:
            self._end(now, event)

    def _first(self, now: float, event: TextEvent) -> None:
        self._first_at = now
        if self._call is not None:
            self._call.first_token = self._call.first_token or now
        if self._adapter:
            self._adapters.move(self._model, self._adapter, WAITING, RUNNING)
        self._count_prompt(event)
        self._tally.time_to_first_token.add_traced(now - self._started, self._exemplar)

    def _end(self, now: float, event: TextEvent) -> None:
        """Count the last event, which has a finish reason."""
        assert event.finish_reason is not None
        self._outcome = "ok"
        self._finish = event.finish_reason.value
        if self._span is not None:
            note_answer(self._span, event)
        self._count_prompt(event)
        tally = self._tally
        if event.completion_tokens > 1 and now > self._first_at:
            self._tpot_s = (now - self._first_at) / (event.completion_tokens - 1)
            tally.time_per_output_token.add_traced(self._tpot_s, self._exemplar)
        tally.decode_duration.add_traced(now - self._first_at, self._exemplar)
        if self._part is None or self._part.is_first("end", self._prompt, event.prompt_tokens):
            tally.prompt_length.add(event.prompt_tokens)
        tally.output_length.add(event.completion_tokens)

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
        self._own_tokens += tokens
        self._own_cached_tokens += cached

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
            end_generation(self._span, self._outcome)
        if self._outcome != "ok":
            tally.aborted_tokens += self._output_tokens
        if self._adapter:
            self._adapters.move(self._model, self._adapter, RUNNING if self._first_at else WAITING, "")
        if self._use is not None:
            self._use.add(self._own_tokens, self._own_cached_tokens, self._output_tokens)
        missed, finish = self._judge(now), self._finish_reason()
        if self._part is not None:
            self._part.end_generation(self._outcome, finish, now, missed, is_calls=not self._is_left_to_others)
        else:
            tally.num_open -= 1
            tally.end(self._outcome, finish, now - self._started, self._exemplar)
            if missed is not None:
                tally.judge(missed)
        self._tell_call()

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

    def _tell_call(self) -> None:
        """Add the generation to its call, and let go of that. Where the call names a route and this target has not
        answered, what was admitted is there for the target that is asked next, and one that has answered before says
        how the call ends."""
        call = self._call
        if call is None:
            return
        call.generated_tokens += self._output_tokens
        call.prompt_tokens += self._own_tokens
        call.cached_tokens += self._own_cached_tokens
        if self._is_left_to_others:
            call.leave(*self._admitted)
        if self._outcome == "ok":
            call.finish = self._finish
        elif not call.first_token if self._is_left_to_others else self._part is None:
            call.finish = self._outcome
        call.release()
