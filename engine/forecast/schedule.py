"""Simulates the admission of waiting sequences, in the order of priorities and fair shares. Times are in steps from
now. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from sluice.engine.forecast.learning import Floats


class ForecastSequence(NamedTuple):
    """A sequence in one course of events."""

    arrives_at: float
    prompt: float
    """Tokens to compute before its first one."""
    output: float
    """Steps from its first token to its end."""
    blocks: float
    leaves_at: float
    """Step at which it gives up if it still waits."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """The sequences of one priority and tenant, which are admitted in order of arrival. At `now` the tenant is charged
    `charged + rate * now` tokens: the prompts of what was admitted, and the output of what runs."""

    priority: float
    weight: float
    charged: float
    rate: float = 0.0
    waiting: list[ForecastSequence] = field(default_factory=list)
    num_gone: int = 0
    was_waiting: bool = False

    @property
    def arrives_at(self) -> float:
        """When its next sequence waits."""
        return self.waiting[self.num_gone][0] if self.num_gone < len(self.waiting) else math.inf


class Limits(NamedTuple):
    """The capacity for waiting sequences."""

    places: int
    blocks: float
    """Free blocks."""
    prefill_budget: float
    """Prompt tokens in a step."""
    tokens_per_step: float
    """Output tokens that a sequence gets in a step."""
    is_in_flight: bool


class ForecastStart(NamedTuple):
    """The admission of a sequence."""

    at: float
    num_prompt: float
    """Prompt tokens of all that were admitted before."""
    num_blocks: float
    """Blocks of those and itself."""
    is_short_of_blocks: bool
    """Whether it waited for blocks although a place was free."""


class RunningEnd(NamedTuple):
    """A running sequence: when it ends, the blocks that are free then, and the index of its group, -1 for none."""

    at: float
    blocks: float
    group: int


def simulate(
    running: Sequence[RunningEnd], groups: Sequence[SimulatedGroup], limits: Limits
) -> tuple[list[ForecastStart], float]:
    """Run one course of events, until the last of the first group has been admitted. Returns the admissions of that
    group, and the mean number of running sequences. Changes the groups."""
    own, is_alone, ends = groups[0], len(groups) == 1, list(running)
    heapify(ends)
    places, blocks, tokens = limits.places, limits.blocks, limits.tokens_per_step
    for _, _, index in ends:
        if index >= 0:
            groups[index].rate += tokens
    now = prefill_ends = num_prompt = num_blocks = num_running = 0.0
    num_admitted, is_short = 0, False
    is_closed = not limits.is_in_flight and bool(ends)
    starts: list[ForecastStart] = []
    while own.num_gone < len(own.waiting):
        chosen = 0 if is_alone else _next_group(groups, now)
        sequence = groups[chosen].waiting[groups[chosen].num_gone] if chosen >= 0 else None
        if sequence is None or places <= 0 or blocks < sequence[3] or is_closed:
            is_short = sequence is not None and places > 0 and not is_closed
            arrives_at = min(group.arrives_at for group in groups) if sequence is None else math.inf
            if ends and ends[0][0] <= arrives_at:
                at, freed, index = heappop(ends)
                now, places, blocks = max(now, at), places + 1, blocks + freed
                if index >= 0:
                    groups[index].rate -= tokens
                    groups[index].charged += tokens * now
                is_closed = not limits.is_in_flight and bool(ends)
                continue
            if sequence is None:
                now = arrives_at
                continue
        _, prompt, output, needed, leaves_at = sequence
        group = groups[chosen]
        group.num_gone += 1
        if chosen == 0:
            starts.append(ForecastStart(now, num_prompt, num_blocks + needed, is_short))
        if now > leaves_at:
            continue
        num_admitted, num_running = num_admitted + 1, num_running + len(ends)
        num_prompt, num_blocks = num_prompt + prompt, num_blocks + needed
        prefill_ends = max(now, prefill_ends) + prompt / limits.prefill_budget
        heappush(ends, RunningEnd(prefill_ends + output, needed, chosen))
        places, blocks = places - 1, blocks - needed
        group.rate += tokens
        group.charged += prompt - tokens * prefill_ends
    return starts, num_running / max(num_admitted, 1)


def _next_group(groups: Sequence[SimulatedGroup], now: float) -> int:
    """Return the index of the group whose sequence goes first, -1 if none waits. A group that comes back is raised to
    the lowest counter of the others."""
    chosen, best, floor = -1, (math.inf, math.inf), math.inf
    is_any_back = False
    for index, group in enumerate(groups):
        if group.arrives_at > now:
            group.was_waiting = False
            continue
        counter = (group.charged + group.rate * now) / group.weight
        if not group.was_waiting:
            is_any_back = True
        elif group.priority <= groups[chosen].priority if chosen >= 0 else True:
            floor = min(floor, counter)
        if (group.priority, counter) < best:
            chosen, best = index, (group.priority, counter)
    if not is_any_back:
        return chosen
    for group in groups:
        if group.arrives_at <= now and not group.was_waiting:
            if floor != math.inf:
                group.charged += max(floor * group.weight - group.charged - group.rate * now, 0.0)
            group.was_waiting = True
    return _next_group(groups, now)


class Curve:
    """When the sequences of a group are admitted, in seconds from the simulation, over all simulated courses."""

    def __init__(self, courses: Sequence[Sequence[ForecastStart]], elapsed: Callable[[Floats, Floats], Floats]) -> None:
        """`elapsed`: the seconds of some steps from now, and of the prompt tokens that are admitted meanwhile."""
        starts = np.array(courses, float)
        seconds = elapsed(starts[:, :, 0], starts[:, :, 1]) * (starts[:, :, 0] > 0.0)
        self._mean = np.maximum.accumulate(seconds.mean(axis=0))
        self._deviation: Floats = seconds.std(axis=0)
        self._blocks: Floats = starts[:, :, 2].mean(axis=0)
        self._is_short_of_blocks = bool(starts[:, :, 3].mean() > 0.5)
        self._places = np.arange(len(self._mean), dtype=float)

    def __len__(self) -> int:
        return len(self._places)

    def at(self, position: float, num_blocks: float) -> tuple[float, float]:
        """Return mean and standard deviation of the seconds until a sequence starts that has `position` others of its
        group before it and needs `num_blocks`."""
        if self._is_short_of_blocks:
            taken = np.interp(position - 1.0, self._places, self._blocks) if position >= 1.0 else 0.0
            position = float(np.interp(taken + num_blocks, self._blocks, self._places))
        last = len(self._places) - 1.0
        mean, deviation = (float(np.interp(position, self._places, each)) for each in (self._mean, self._deviation))
        if position > last:
            middle = len(self._places) // 2
            mean += (position - last) * float(self._mean[-1] - self._mean[middle]) / max(last - middle, 1.0)
            deviation *= mean / max(float(self._mean[-1]), 1e-9)
        return mean, deviation
