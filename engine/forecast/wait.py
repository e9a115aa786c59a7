"""Predicts how long a new request waits until it is admitted, from a simulation of the schedule."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from sluice.engine.forecast.learning import Calibration, OutputLengths, PrefillPace, StepTimeModel
from sluice.engine.forecast.schedule import Curve, ForecastSequence, Limits, RunningEnd, SimulatedGroup, simulate
from sluice.engine.scheduling.planner import ChunkLimits, find_policy
from sluice.engine.scheduling.queue import WaitingGroup, WaitingQueue
from sluice.engine.sequence import QueuedSequence, RequestSize
from sluice.engine.types import EngineInfo

MIN_STEPS, MIN_ENDINGS = 32, 32
"""Steps and ends of sequences to observe before a prediction is reliable enough to reject requests by it."""
NUM_COURSES = 8
"""Simulated courses of events. More would say little: what outputs will be spreads the waits further."""
MAX_COURSE_GROUPS = 32
"""Bound of courses times tenants: the more tenants wait, the longer a course takes."""
MAX_SIMULATED = 256
"""Places of the queue that are simulated; beyond them the wait grows as it did before."""
MAX_SHARE = 1.0 / 50
"""Share of the engine's time that simulations may take."""
MIN_PAUSE_STEPS = 8
"""Steps between two simulations at least; so many make no difference to a wait."""
MAX_SIMULATIONS = 64
"""Groups whose simulation is kept."""
EVERYBODY = (math.inf, "")
"""The group of all that wait, in their order."""
RATE = 1.0 / 64
"""Weight of the latest observation in running means."""


class WaitPrediction(NamedTuple):
    """The predicted wait of a request, in seconds."""

    wait_s: float
    """The mean."""
    deviation_s: float = 0.0
    """The standard deviation; infinite before the forecast is warm."""
    earliest_s: float = 0.0
    """A wait that is hardly ever undercut."""
    service_s: float = 0.0
    """From admission to the end, if its output is one of the shortest."""
    is_warm: bool = False
    """Whether the forecast has observed enough to reject by it."""


class EngineState(NamedTuple):
    """The state of the engine at a prediction."""

    running: Collection[QueuedSequence]
    queue: WaitingQueue[Any]
    free_blocks: int
    """Blocks that no running sequence reserves."""
    now: float


@dataclass(slots=True)
class _Simulation:
    """A simulation for one group."""

    curve: Curve
    at: float
    next_at: float
    """When the engine has moved on so far that another one may differ, by the forecast's clock."""
    num_groups: int
    num_waiting: int
    """Sequences that waited then, of all groups."""
    num_gone: int = 0
    """Sequences of the group that have left the queue since."""

    def reaches(self, num_ahead: int) -> bool:
        """Return whether it has the place behind so many of the group."""
        length = len(self.curve)
        return num_ahead + self.num_gone < length or length >= MAX_SIMULATED

    def is_current(self, now: float, num_waiting: int) -> bool:
        """Return whether things are still much as they were: a group's own sequences alone may have become more."""
        has_grown = self.num_groups > 1 and num_waiting > 1.2 * self.num_waiting + 1
        return now < self.next_at and not has_grown


class _Draw(NamedTuple):
    """The parameters with which the sequences of all courses are drawn."""

    rng: np.random.Generator
    num_courses: int
    now: float
    step_s: float
    block_share: float
    """Share of its worst case that a sequence holds."""


def _find_groups(key: tuple[float, str], state: EngineState) -> list[WaitingGroup]:
    if key == EVERYBODY:
        return [WaitingGroup(*key, 1.0, 0.0, list(islice(state.queue, MAX_SIMULATED)), 0.0, 0.0)]
    priority, tenant = key
    return state.queue.groups(int(priority), tenant, MAX_SIMULATED, state.now)


class WaitForecast:
    """Simulates the schedule some times, with outputs drawn from what recent ones were like, and with steps that take
    what recent ones took. The simulation is kept until the engine has moved on and its cost is a small share of the
    time since; whoever comes meanwhile is looked up in it."""

    def __init__(
        self, limits: EngineInfo, clock: Callable[[], float] = perf_counter, *, is_chunk_chosen: bool = False
    ) -> None:
        """`clock` measures what a simulation costs. `is_chunk_chosen`: whether load decides how large chunks are."""
        self._limits = limits
        self._clock = clock
        self._policy = find_policy(limits.scheduler_policy)
        self._steps = StepTimeModel()
        self.pace = PrefillPace(ChunkLimits(limits.block_size, limits.max_num_batched_tokens, is_chunk_chosen))
        self._lengths = OutputLengths()
        self._calibration = Calibration()
        self._computed_share = 1.0
        """Share of prompts' tokens that is computed and not found in the prefix cache."""
        self._leave_rate = 0.0
        self._simulations: OrderedDict[tuple[float, str], _Simulation] = OrderedDict()
        self._next_simulation_at = -math.inf
        """Until then MAX_SHARE is spent, and old simulations are used again."""
        self._mean_running = self._mean_prefill = 0.0
        """Sequences, and tokens of prompts, in a step of the last simulation."""
        self._examples: OrderedDict[tuple[float, str], RequestSize] = OrderedDict()
        """The latest request of each priority and tenant, the latest of all last."""
        self.waits_total = 0
        self.wait_seconds_total = 0.0
        self.wait_error_seconds_total = 0.0

    @property
    def is_warm(self) -> bool:
        """Whether enough was observed to reject requests by the predictions."""
        return self._steps.num_observed >= MIN_STEPS and self._lengths.num_observed >= MIN_ENDINGS

    # -- observations

    def observe_step(self, num_seqs: int, num_prefill: int, seconds: float) -> None:
        """Learn from a step of `num_seqs` sequences, with `num_prefill` tokens of prompts among its tokens."""
        self._steps.observe(num_seqs, num_prefill, seconds)

    def token_prices(self, num_seqs: int) -> tuple[float, float]:
        """Return what a token gained is worth while `num_seqs` decode, and what one more costs, in seconds."""
        step_s = self._steps.seconds(num_seqs)
        return step_s / num_seqs, self._steps.sequence_seconds(num_seqs)

    def speeds(self, num_seqs: int) -> dict[str, float]:
        """Return the fields of EngineStats about the speed while `num_seqs` sequences run; 0 while it is not known."""
        if self._steps.num_observed < MIN_STEPS:
            return {"prefill_tokens_per_s": 0.0, "decode_step_s": 0.0}
        step_s = self._steps.seconds(num_seqs)
        chunk = self._limits.max_num_batched_tokens
        chunk_s = self._steps.seconds(num_seqs, chunk) - step_s
        return {"prefill_tokens_per_s": chunk / chunk_s if chunk_s > 0.0 else 0.0, "decode_step_s": step_s}

    def observe_end(self, sequence: RequestSize, *, is_cancelled: bool = False) -> None:
        """Learn from a running sequence that has ended, by itself or cancelled, as a stop string does."""
        self._lengths.observe(sequence, is_cancelled=is_cancelled)

    def observe_leaving(self, sequence: QueuedSequence, waited_s: float) -> None:
        """Learn from a client that left while its request waited."""
        self._note_gone(sequence)
        self._calibration.observe_wait(waited_s, has_left=True)

    def observe_tokens(self, num_seqs: int, num_tokens: int) -> None:
        """Learn how many tokens a step with speculation brought to the sequences that decode."""
        self._steps.tokens_per_step += RATE * (num_tokens / num_seqs - self._steps.tokens_per_step)

    def observe_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Learn which part of a prompt was in the prefix cache."""
        self._computed_share += RATE * ((num_tokens - num_cached) / num_tokens - self._computed_share)

    def record_wait(self, sequence: QueuedSequence, actual_s: float) -> None:
        """Add an admitted sequence to the sums for `EngineStats`, and learn from the error of its prediction."""
        predicted_s = sequence.predicted_wait_s
        self._note_gone(sequence)
        self.waits_total += 1
        self.wait_seconds_total += actual_s
        self.wait_error_seconds_total += abs(predicted_s - actual_s)
        self._calibration.observe_wait(actual_s, has_left=False)
        if sequence.predicted_deviation_s < math.inf:
            self._calibration.observe_error(predicted_s, sequence.predicted_deviation_s, actual_s)

    def _note_gone(self, sequence: QueuedSequence) -> None:
        for key in ((sequence.priority, sequence.tenant), EVERYBODY):
            simulation = self._simulations.get(key)
            if simulation is not None:
                simulation.num_gone += 1

    # -- predictions

    def predict(self, sequence: QueuedSequence, state: EngineState) -> WaitPrediction:
        """Predict the wait of a new sequence, and how long it runs at least."""
        self._examples[sequence.priority, sequence.tenant] = sequence.copy()
        self._examples.move_to_end((sequence.priority, sequence.tenant))
        if len(self._examples) > MAX_SIMULATIONS:
            self._examples.popitem(last=False)
        prediction = self.predict_wait(sequence.priority, sequence.tenant, sequence.worst_case_blocks, state)
        step_s = self._steps.seconds(max(self._mean_running, 1.0))
        service_s = step_s * self._lengths.shortest(sequence, 0.01) / self._steps.tokens_per_step
        return prediction._replace(service_s=service_s)

    def predict_wait(self, priority: int, tenant: str, num_blocks: int, state: EngineState) -> WaitPrediction:
        """Predict the wait of a sequence of `num_blocks`: 0 if it starts at once, and before any was submitted."""
        can_join = self._policy.is_in_flight or not state.running
        has_room = not len(state.queue) and len(state.running) < self._limits.max_num_seqs and can_join
        if not self._examples or (has_room and num_blocks <= self._num_free(state)):
            return WaitPrediction(0.0, is_warm=self.is_warm)
        num_ahead = state.queue.num_waiting(priority, tenant)
        wait_s, deviation_s = self._predict_start((priority, tenant), num_ahead, num_blocks, state)
        if not self.is_warm:
            return WaitPrediction(wait_s, math.inf)
        earliest_s = self._calibration.earliest(wait_s, deviation_s)
        return WaitPrediction(wait_s, deviation_s, earliest_s, is_warm=True)

    def predict_return(self, num_before: int, sequence: QueuedSequence, state: EngineState) -> float:
        """Predict in how many seconds so many sequences have been admitted, whoever's, and the place of one more is
        free: `sequence`, which was refused, and those before it, which wait or will have come back by then."""
        key = sequence.priority, sequence.tenant
        is_alone = state.queue.num_waiting(*key) == len(state.queue)
        return self._predict_start(key if is_alone else EVERYBODY, num_before, sequence.worst_case_blocks, state)[0]

    def _predict_start(
        self, key: tuple[float, str], num_ahead: int, num_blocks: int, state: EngineState
    ) -> tuple[float, float]:
        """Return mean and standard deviation of the seconds until a sequence of the group starts that has so many of it
        before it."""
        simulation = self._find_simulation(key, num_ahead, state)
        start_s, deviation_s = simulation.curve.at(num_ahead + simulation.num_gone, num_blocks)
        return max(start_s - (state.now - simulation.at), 0.0), deviation_s

    def _find_simulation(self, key: tuple[float, str], num_ahead: int, state: EngineState) -> _Simulation:
        began = self._clock()
        is_spent = began < self._next_simulation_at
        kept = self._simulations.get(key) or (self._find_similar(key[0]) if is_spent else None)
        if kept is not None and kept.reaches(num_ahead) and (is_spent or kept.is_current(began, len(state.queue))):
            return kept
        groups = _find_groups(key, state)
        curve = self._simulate(groups, num_ahead, state)
        ended = self._clock()
        self._next_simulation_at = ended + (ended - began) / MAX_SHARE
        next_at = ended + MIN_PAUSE_STEPS * self._steps.seconds(1.0)
        simulation = self._simulations[key] = _Simulation(curve, state.now, next_at, len(groups), len(state.queue))
        self._simulations.move_to_end(key)
        if len(self._simulations) > MAX_SIMULATIONS:
            self._simulations.popitem(last=False)
        return simulation

    def _find_similar(self, priority: float) -> _Simulation | None:
        """Return the latest simulation of a group that goes no later than the priority: a new tenant's first sequence
        starts about when the next one of a tenant does that has waited."""
        latest = reversed(self._simulations.items())
        return next((simulation for (level, _), simulation in latest if level <= priority), None)

    def _simulate(self, groups: list[WaitingGroup], num_ahead: int, state: EngineState) -> Curve:
        """Simulate the admission of the first group's sequences, of which `num_ahead` wait, and as many to come."""
        limits, steps, running = self._limits, self._steps, list(state.running)
        share = self._block_share(running, state.free_blocks)
        step_s = max(steps.seconds(max(self._mean_running, len(running), 1.0), self._mean_prefill), 1e-6)
        num_courses = max(min(NUM_COURSES, MAX_COURSE_GROUPS // len(groups)), 2)
        draw = _Draw(np.random.default_rng(steps.num_observed), num_courses, state.now, step_s, share)
        self._lengths.note_running(running)
        ends = self._draw_ends(running, groups, draw)
        # Of a long queue the group has only those that are among the first of all.
        own_length = min(2 * num_ahead + limits.max_num_seqs, MAX_SIMULATED)
        waiting = [self._draw_waiting(group, own_length if group is groups[0] else 0, draw) for group in groups]
        free = Limits(
            limits.max_num_seqs - len(running),
            limits.num_blocks - share * sum(s.worst_case_blocks for s in running),
            self._prefill_budget(running),
            steps.tokens_per_step,
            self._policy.is_in_flight,
        )
        courses = []
        for course in range(num_courses):
            simulated = [
                SimulatedGroup(group.priority, group.weight, group.charged, waiting=each[course])
                for group, each in zip(groups, waiting, strict=True)
            ]
            courses.append(simulate(ends[course], simulated, free))
        num_running = self._mean_running = max(float(np.mean([mean for _, mean in courses])), 1.0)
        num_prompt = float(sum(s.num_tokens_left - 1 for s in running))
        lasts = [starts[-1] for starts, _ in courses]
        num_steps = sum(last.at for last in lasts)
        self._mean_prefill = sum(last.num_prompt for last in lasts) / num_steps if num_steps else 0.0
        return Curve(
            [starts for starts, _ in courses],
            lambda at, admitted: steps.elapsed(at, num_running, admitted + num_prompt),
        )

    def _prefill_budget(self, running: Collection[QueuedSequence]) -> int:
        budget = self._limits.max_num_batched_tokens - len(running)
        return max(min(budget, self.pace.max_prefill_tokens()[not running]), 1)

    def _draw_ends(
        self, running: list[QueuedSequence], groups: list[WaitingGroup], draw: _Draw
    ) -> list[list[RunningEnd]]:
        """Return the ends of the running sequences in each course."""
        left = self._lengths.sample_left(running, draw.num_courses, draw.rng) / self._steps.tokens_per_step
        prompts = np.array([s.num_tokens_left - 1 for s in running], float)
        left += (np.cumsum(prompts) * (prompts > 0) / self._prefill_budget(running))[:, None]
        due = np.array([(s.deadline - draw.now) / draw.step_s for s in running])
        ends = np.minimum(left, np.maximum(due, 0.0)[:, None])
        members = {(group.priority, group.tenant): index for index, group in enumerate(groups)}
        blocks = [draw.block_share * s.worst_case_blocks for s in running]
        groups_of = [members.get((s.priority, s.tenant), -1) for s in running]
        return [list(map(RunningEnd, course, blocks, groups_of)) for course in ends.T.tolist()]

    def _draw_waiting(self, group: WaitingGroup, length: int, draw: _Draw) -> list[list[ForecastSequence]]:
        """Return the sequences of a group in each course: those that wait, and those that are expected. If `length` is
        not 0, there are so many in all, as if they waited already."""
        known = len(group.waiting)
        num_expected = length - known if length else min(int(group.arrival_rate * group.arrival_s), MAX_SIMULATED)
        latest = next(reversed(self._examples.values()))
        example = self._examples.get((group.priority, group.tenant), latest)
        expected: Sequence[RequestSize] = group.waiting or [example]
        sequences = [*group.waiting, *islice(cycle(expected), max(num_expected, 0))]
        left = self._lengths.sample_left(sequences, draw.num_courses, draw.rng) / self._steps.tokens_per_step
        arrives, leaves = np.zeros(left.shape), np.full(left.shape, np.inf)
        due = np.array([min(s.start_deadline, s.deadline) - draw.now for s in group.waiting])
        patience = self._calibration.sample_leaving(draw.rng, (known, draw.num_courses))
        leaves[:known] = np.minimum(patience, due[:, None]) / draw.step_s
        if not length and num_expected > 0:
            gaps = draw.rng.exponential(1.0 / group.arrival_rate, (num_expected, draw.num_courses))
            arrives[known:] = np.cumsum(gaps, axis=0) / draw.step_s
        prompts = [s.num_tokens * self._computed_share for s in sequences]
        blocks = [draw.block_share * s.worst_case_blocks for s in sequences]
        columns = np.stack((arrives.T, left.T, leaves.T), axis=1).tolist()
        return [list(map(ForecastSequence, at, prompts, output, blocks, until)) for at, output, until in columns]

    def _num_free(self, state: EngineState) -> float:
        worst_case = sum(s.worst_case_blocks for s in state.running)
        return self._limits.num_blocks - self._block_share(state.running, state.free_blocks) * worst_case

    def _block_share(self, running: Collection[QueuedSequence], free_blocks: int) -> float:
        """Return the share of their worst case that sequences hold: shared blocks count once, and under policies that
        do not reserve the worst case it is half of the output that is expected."""
        worst_case = sum(s.worst_case_blocks for s in running)
        if not worst_case:
            return 1.0
        if self._policy.reserves_worst_case:
            return (self._limits.num_blocks - free_blocks) / worst_case
        unused = sum(s.max_tokens - s.num_output - self._lengths.expect(s) / 2 for s in running)
        return max(1.0 - max(unused / self._limits.block_size - len(running), 0.0) / worst_case, 0.05)
