"""Clients that a full queue refuses, and that come back when they were told to: how many find a place at once, how far
off the predictions for those that wait are, and how long the engine takes for all of them.

The kinds of load follow each other on one engine. Each has been there before, in a phase that is not judged.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.predicted_wait.engines import RealEngine, VirtualEngine
from benchmarks.predicted_wait.trial import Outcome
from benchmarks.predicted_wait.workloads import Mix, Pattern, Workload, at_once, chat, document, steady

NUM_REQUESTS, NUM_PLACES, QUEUE_SIZE = 96, 4, 32
"""A place is free about twenty times a second, and clients come back at whole seconds."""
MIN_WAIT_S = 0.5
FIRST_RETRY_TARGET = Target(90.0, is_ceiling=False)
STEADY_TARGET, BURST_TARGET = Target(15.0), Target(30.0)


class Phase(NamedTuple):
    """A load that follows others on the same engine."""

    name: str
    mix: Mix
    pattern: Pattern
    target: Target


COLD = (Phase("cold", document, at_once, BURST_TARGET), Phase("cold", chat, at_once, BURST_TARGET)) * 2
"""Twice, because the first times to come back are guessed, and the engine waits for the clients."""
PHASES = (
    Phase("steady chats", chat, steady, STEADY_TARGET),
    Phase("burst of chats", chat, at_once, BURST_TARGET),
    Phase("burst of questions after chats", document, at_once, BURST_TARGET),
    Phase("steady questions", document, steady, STEADY_TARGET),
    Phase("burst of chats after questions", chat, at_once, BURST_TARGET),
)


class Result(NamedTuple):
    """A phase in figures."""

    first_retry: float
    """Percent of the refused clients that found a place when they came back."""
    error: float
    """Median error of the predicted waits, in percent."""
    longest_told_s: float
    duration_s: float


def run_phases(engine: VirtualEngine | RealEngine, seed: int) -> Iterator[Result]:
    """Yield the result of each of PHASES."""
    rng = random.Random(seed)
    workload = Workload("retries", chat, steady)
    with engine.trial(workload, seed, max_num_seqs=NUM_PLACES, queue_size=QUEUE_SIZE) as trial:
        rates: dict[Mix, float] = {}
        for phase in (*COLD, *PHASES):
            times = phase.pattern(rng, NUM_REQUESTS, rates.get(phase.mix, 1.0))
            outcomes = trial.run([replace(phase.mix(rng), at_s=at_s) for at_s in times])
            duration_s = _duration(outcomes)
            if phase in PHASES:
                yield _judge(outcomes, duration_s)
            else:
                rates[phase.mix] = NUM_REQUESTS / duration_s


def _duration(outcomes: Sequence[Outcome]) -> float:
    ends = [each.submitted_at + (each.finished_s or 0.0) for each in outcomes]
    return max(ends) - min(each.first_submitted_at for each in outcomes)


def _judge(outcomes: Sequence[Outcome], duration_s: float) -> Result:
    refused = [each.told_s for each in outcomes if each.told_s]
    waits = [(each.predicted_s, each.waited_s) for each in outcomes if (each.waited_s or 0.0) >= MIN_WAIT_S]
    errors = [100.0 * abs(predicted - actual) / actual for predicted, actual in waits if actual]
    return Result(
        100.0 * sum(len(told) == 1 for told in refused) / len(refused) if refused else 100.0,
        statistics.median(errors) if errors else 0.0,
        max((max(told) for told in refused), default=0.0),
        duration_s,
    )


def measure(name: str, engine: VirtualEngine | RealEngine, num_repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure all phases with a short queue."""
    samples: dict[str, list[Result]] = defaultdict(list)
    for seed in range(num_repeats):
        for phase, result in zip(PHASES, run_phases(engine, seed), strict=True):
            samples[phase.name].append(result)
            report(f"{name}, {phase.name}: " + ", ".join(f"{k} {v:.3g}" for k, v in result._asdict().items()))
    figures = []
    for phase in PHASES:
        found, subject = samples[phase.name], f"{name}: {phase.name}, with retries"
        first, error = tuple(each.first_retry for each in found), tuple(each.error for each in found)
        figures.append(Figure("found a place at the first retry", subject, "%", first, FIRST_RETRY_TARGET))
        figures.append(Figure("error, p50", subject, "%", error, phase.target))
        figures.append(Figure("longest Retry-After", subject, "s", tuple(each.longest_told_s for each in found)))
        figures.append(Figure("duration", subject, "s", tuple(each.duration_s for each in found)))
    return figures
