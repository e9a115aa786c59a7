"""Where a generation's time went, from what its engine says: spans of queue, prefill and decode."""

from time import perf_counter_ns

from sluice.engine.types import GenerateRequest, SequenceTiming
from sluice.record.spans import Span

_NS_PER_S = 1_000_000_000


class GenerationSpans:
    """The spans of one generation. An engine tells durations, so that its clock need not be this process's."""

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
