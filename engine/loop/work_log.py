"""A record of an engine's work from step to step, kept while somebody watches."""

from collections.abc import Callable
from time import perf_counter, time

from engine.frames import AskView, EngineView, StepRecord, TenantTokens
from engine.recent import Recent

MAX_STEPS = MAX_WAITS = 1024
MAX_TENANTS = 1000
"""Most tenants whose tokens are told apart: clients may name tenants."""
OTHERS = "other"
"""The name under which the tokens of further tenants count."""


class WorkLog:
    """Records steps, waits and the tokens of tenants until nobody has asked for as long as the last one wanted. Used by
    the engine's thread alone. `is_on` is what costs where nobody watches."""

    def __init__(self, clock: Callable[[], float] = perf_counter, wall_clock: Callable[[], float] = time) -> None:
        self.is_on = False
        self._clock = clock
        self._wall_clock = wall_clock
        self._until = 0.0
        self._steps: Recent[StepRecord] = Recent(MAX_STEPS)
        self._waits: Recent[float] = Recent(MAX_WAITS)
        self._tenants: dict[str, TenantTokens] = {}

    def record_step(self, seconds: float, num_prefill: int, num_decode: int, num_seqs: int) -> None:
        """Record a step that has ended now. Ends the recording where nobody has asked for long."""
        if self._clock() >= self._until:
            self._end()
            return
        at_s, duration_ms = round(self._wall_clock(), 4), round(seconds * 1000, 3)
        self._steps.append(StepRecord(at_s, duration_ms, num_prefill, num_decode, num_seqs))

    def _end(self) -> None:
        self.is_on = False
        self._steps.clear()
        self._waits.clear()
        self._tenants = {}

    def record_wait(self, wait_s: float) -> None:
        """Record how long a request has waited that was admitted."""
        self._waits.append(wait_s)

    def record_tokens(self, tenant: str, num_prompt: int, num_generated: int) -> None:
        """Count tokens of a tenant that were computed."""
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHERS
        tokens = self._tenants.get(tenant, TenantTokens())
        self._tenants[tenant] = TenantTokens(tokens.prompt + num_prompt, tokens.generated + num_generated)

    def view(self, question: AskView) -> EngineView:
        """Return what was recorded since, and record from now on for as long as the question wants."""
        self.is_on, self._until = True, max(self._until, self._clock() + question.keep_s)
        return EngineView(
            num_steps=self._steps.count,
            steps=self._steps.since(question.num_steps),
            num_waits=self._waits.count,
            waits=self._waits.since(question.num_waits),
            tenants=dict(self._tenants),
        )
