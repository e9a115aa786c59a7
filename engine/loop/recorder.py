"""The one record of an engine's work. Totals, distributions, what watchers see and what a profile has are views of it.

Each step is noted once, at its end; each sequence at its admission, at the end of its prefill, and where its tenant is
charged. A picture of the KV cache has the state and the owner of each block, or of some blocks together. Used by the
engine's thread alone.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from time import perf_counter, time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.engine.frames import (
    OTHER_HOLDER,
    RESERVED,
    AskView,
    BlockMap,
    BlockOwner,
    EngineView,
    ProfiledStep,
    StepProfile,
    StepRecord,
    TenantTokens,
)
from sluice.engine.kv_cache import BlockState, KvCacheManager
from sluice.engine.recent import Recent
from sluice.engine.scheduling.planner import StepPlan
from sluice.engine.sequence import Sequence
from sluice.engine.statistics import EngineHistograms

MAX_STEPS = MAX_WAITS = 1024
"""Most steps and most waits that are kept for watchers."""
MAX_TENANTS = 1000
"""Most tenants whose tokens are told apart: clients may name tenants."""
OTHERS = "other"
"""The name under which the tokens of further tenants count."""
_MAX_PROFILED = 4096
"""Most steps that wait for a frame."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start; `EngineStats` explains them."""

    steps: int = 0
    runner_seconds: float = 0.0
    overhead_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    timeouts: int = 0

    def totals(self) -> dict[str, float]:
        """Return the `*_total` fields of `EngineStats`."""
        return {total: getattr(self, name) for name, total in _TOTALS}


_TOTALS = tuple((field.name, f"{field.name}_total") for field in fields(Counters))


class Step(NamedTuple):
    """A step that has run: what its batch had, and its seconds, those of the runner among them."""

    num_seqs: int
    num_decode: int
    num_prefill: int
    """Tokens of prompts."""
    num_tokens: int
    seconds: float
    runner_seconds: float


class WorkRecorder:
    """Records steps and sequences. What is only for watchers costs a comparison while nobody watches."""

    def __init__(self, clock: Callable[[], float] = perf_counter, wall_clock: Callable[[], float] = time) -> None:
        self.counters = Counters()
        self._clock = clock
        self._wall_clock = wall_clock
        self._histograms = counted = EngineHistograms()
        self._step_seconds, self._step_sequences, self._step_tokens, self._waited, self._prefilled = counted.all
        self.is_watched = False
        self._watched_until = 0.0
        self._steps: Recent[StepRecord] = Recent(MAX_STEPS)
        self._waits: Recent[float] = Recent(MAX_WAITS)
        self._tenants: dict[str, TenantTokens] = {}

    # -- what happens

    def record_step(self, step: Step) -> None:
        """Record a step that has ended now."""
        self.counters.overhead_seconds += step.seconds - step.runner_seconds
        self._step_seconds.add(step.seconds)
        self._step_sequences.add(step.num_seqs)
        self._step_tokens.add(step.num_tokens)
        if self.is_watched:
            self._show(step)

    def record_wait(self, seconds: float) -> None:
        """Record the time from a sequence's submission to its admission."""
        self._waited.add(seconds)
        if self.is_watched:
            self._waits.append(seconds)

    def record_prefill(self, seconds: float) -> None:
        """Record the time from a sequence's admission to its first token."""
        self._prefilled.add(seconds)

    def record_tokens(self, tenant: str, num_prompt: int, num_generated: int) -> None:
        """Record tokens of a tenant that were computed. They count for watchers alone."""
        if not self.is_watched:
            return
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHERS
        tokens = self._tenants.get(tenant, TenantTokens())
        self._tenants[tenant] = TenantTokens(tokens.prompt + num_prompt, tokens.generated + num_generated)

    def _show(self, step: Step) -> None:
        """Keep a step for watchers; keep nothing any more where nobody has asked for long."""
        if self._clock() >= self._watched_until:
            self.is_watched = False
            self._steps.clear()
            self._waits.clear()
            self._tenants = {}
            return
        at_s, duration_ms = round(self._wall_clock(), 4), round(step.seconds * 1000, 3)
        self._steps.append(StepRecord(at_s, duration_ms, step.num_prefill, step.num_decode, step.num_seqs))

    # -- views

    def histograms(self) -> bytes:
        """Return the histograms so far, as `EngineStats.histograms` has them."""
        return self._histograms.pack()

    def view(self, question: AskView) -> EngineView:
        """Return what was recorded since, and keep it from now on for as long as the question wants."""
        self.is_watched = True
        self._watched_until = max(self._watched_until, self._clock() + question.keep_s)
        return EngineView(
            num_steps=self._steps.count,
            steps=self._steps.since(question.num_steps),
            num_waits=self._waits.count,
            waits=self._waits.since(question.num_waits),
            tenants=dict(self._tenants),
        )


class StepRecorder(WorkRecorder):
    """Records the steps of a loop that runs them itself, with the time of each part while somebody profiles it."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        super().__init__(clock)
        self._began = self._marked = 0.0
        self.run_began = self.run_ended = 0.0
        """When the runner began the last batch, and when it was done."""
        self._runner_seconds = 0.0
        self._is_profiled = False
        self._profiled_until = 0.0
        self._parts: list[tuple[str, float]] = []
        self._profiled: list[ProfiledStep] = []

    def profile(self, seconds: float) -> None:
        """Record the parts of the steps that begin in the next `seconds`."""
        self._profiled_until = self._clock() + seconds

    def begin(self, now: float) -> None:
        """Begin a step."""
        self._began, self._runner_seconds = now, 0.0
        self._is_profiled = now < self._profiled_until
        if self._is_profiled:
            self._parts, self._marked = [], now

    def mark(self, part: str) -> None:
        """Note that a part has ended, which began with the end of the one before."""
        if self._is_profiled:
            now = self._clock()
            self._parts.append((part, now - self._marked))
            self._marked = now

    def record_run(self, began: float, ended: float) -> None:
        """Record the runner's part of the step."""
        self.run_began, self.run_ended = began, ended
        self._runner_seconds = ended - began
        self.counters.runner_seconds += ended - began
        self.counters.steps += 1

    def end(self, plan: StepPlan[Sequence], num_running: int, num_waiting: int, began: float | None = None) -> Step:
        """End the step, whose plan was not empty, and return its record. `began` is for one that began before the
        loop's iteration in which it ends."""
        num_decode, num_prefill = len(plan.decode), sum(chunk.num_tokens for chunk in plan.prefill)
        if self._is_profiled and len(self._profiled) < _MAX_PROFILED:
            self._profiled.append(
                ProfiledStep(
                    self._began,
                    self._parts,
                    num_decode=num_decode,
                    num_prefill_seqs=len(plan.prefill),
                    num_prefill_tokens=num_prefill,
                    num_admitted=len(plan.admitted),
                    num_preempted=len(plan.preempted),
                    num_running=num_running,
                    num_waiting=num_waiting,
                )
            )
        num_tokens = num_prefill + num_decode + sum(plan.num_drafts)
        num_seqs, seconds = num_decode + len(plan.prefill), self._clock() - (self._began if began is None else began)
        step = Step(num_seqs, num_decode, num_prefill, num_tokens, seconds, self._runner_seconds)
        self.record_step(step)
        return step

    def take_profile(self) -> StepProfile | None:
        """Return the steps that were profiled since the last call; None without any."""
        if not self._profiled:
            return None
        steps, self._profiled = self._profiled, []
        return StepProfile(self._clock(), steps)


MAX_CELLS = 4096
MAX_HOLDERS = 200
"""Most sequences that are named; the blocks of others are drawn as those of another one."""
MAX_ID_CHARS = 128
"""Clients choose ids of requests. What is longer is cut."""


def draw_block_map(
    kv: KvCacheManager, running: Collection[Sequence], num_reserved: int, max_cells: int = MAX_CELLS
) -> BlockMap:
    """Draw the blocks in the order of their numbers. `num_reserved` are those that `running` hold or may still need. A
    cell of several blocks has the state that most of those have that are held, else cached, so that a few sequences are
    seen in a large cache; of two as frequent ones the higher."""
    states = kv.block_states()
    num_shared = int(np.count_nonzero(states == BlockState.SHARED))
    named = sorted(running, key=lambda sequence: -sequence.num_allocated_blocks)
    numbers = (n if n <= MAX_HOLDERS else OTHER_HOLDER for n in range(1, len(named) + 1))
    owners = kv.block_owners(dict(zip((each.table_row for each in named), numbers, strict=True)))
    owners[kv.pool.next_blocks(max(0, num_reserved - kv.pool.num_used))] = RESERVED
    per_cell = max(1, -(-len(states) // max_cells))
    if per_cell > 1:
        blocks, states, owners = _pad(states, per_cell), _merge(states, per_cell), _pad(owners, per_cell)
        is_of_state = blocks == states[:, None]
        owners = owners[np.arange(len(states)), is_of_state.argmax(1)]
    holders = [_describe(sequence) for sequence in named[:MAX_HOLDERS]]
    return BlockMap(states.tobytes(), per_cell, num_shared, owners.tobytes(), holders)


def _merge(states: NDArray[np.uint8], per_cell: int) -> NDArray[np.uint8]:
    """Return the state of each cell."""
    num_cells, num_states = -(-len(states) // per_cell), len(BlockState)
    places = np.arange(len(states)) // per_cell * num_states + states
    counts = np.bincount(places, minlength=num_cells * num_states).reshape(num_cells, num_states)
    for state in (BlockState.FREE, BlockState.CACHED):  # it gives way to all above it
        counts[counts[:, state + 1 :].any(1), state] = 0
    return np.asarray(num_states - 1 - counts[:, ::-1].argmax(1), np.uint8)


def _pad(values: NDArray[np.uint8], per_cell: int) -> NDArray[np.uint8]:
    """Return the values of each cell, [num_cells, per_cell]; 0 beyond the last block."""
    padded = np.zeros((-(-len(values) // per_cell), per_cell), np.uint8)
    padded.reshape(-1)[: len(values)] = values
    return padded


def _describe(sequence: Sequence) -> BlockOwner:
    request_id = sequence.request.request_id[:MAX_ID_CHARS]
    return BlockOwner(request_id, sequence.num_allocated_blocks, sequence.worst_case_blocks)
