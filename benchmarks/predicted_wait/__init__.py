"""Compares predicted waits with actual ones, and counts what is refused by them, under bursts, ramps, mixed lengths,
shared prefixes, tenants, clients that leave and a noisy machine: in an engine in simulated time, with a model, and in a
fleet of two engines. `retries` has clients that a full queue refuses.

A wait is the time from a request's submit in the engine to its admission. Errors are relative to the actual wait. They
count for waits of MIN_WAIT_S and more: a shorter one lasts a few steps, and nobody is refused for it. Each trial begins
with a burst on a cold engine, which is not judged. Where later requests overtake others, the load goes on after the
last judged one, because who comes later decides how long it waits.

Deadlines are drawn from a tenth of the usual wait to twice that. A seventh of the requests are served even if they are
refused: those tell how many of the refused would have been in time. A second trial of the same requests refuses none.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.predicted_wait import fleet, retries
from benchmarks.predicted_wait.engines import RealEngine, VirtualEngine
from benchmarks.predicted_wait.trial import Outcome
from benchmarks.predicted_wait.workloads import WORKLOADS, Arrival, Workload
from sluice.gateway.checkpoint import find_checkpoint

NUM_COLD, NUM_REQUESTS = 128, 480
MIN_WAIT_S = 0.1
EXEMPT_SHARE = 1 / 7
MEDIAN_TARGET, P90_TARGET, WRONG_TARGET = 15.0, 40.0, 1.0

Engine = VirtualEngine | RealEngine


class Refusals(NamedTuple):
    """The requests that were refused for their deadline."""

    num_requests: int = 0
    num_refused: int = 0
    num_tried: int = 0
    """The refused ones that were served all the same."""
    num_wrong: int = 0
    """The served ones of them that were in time."""
    num_wrong_unrefused: int = 0
    """The refused ones that were in time where nobody was refused."""
    num_late: int = 0
    """Requests that were accepted and late."""

    def plus(self, other: "Refusals") -> "Refusals":
        return Refusals(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Scenario:
    """A workload on one kind of engine."""

    def __init__(self, engine: Engine, workload: Workload, seed: int) -> None:
        self._engine, self._workload, self._seed = engine, workload, seed
        rng = random.Random(seed)
        self._cold = [replace(workload.mix(rng), patience_s=np.inf) for _ in range(NUM_COLD)]
        with engine.trial(workload, seed) as trial:
            rate = _rate(trial.run(self._cold))
        self._arrivals = workload.arrivals(rng, NUM_REQUESTS, rate)

    def waits(self) -> list[Outcome]:
        """Return the judged requests of a trial without deadlines."""
        outcomes = self._run(self._arrivals)
        if self._workload.is_overtaken:
            outcomes = outcomes[: len(outcomes) // 2]
        return [each for each in outcomes if each.waited_s is not None and each.waited_s >= MIN_WAIT_S]

    def refusals(self, waits: Sequence[Outcome]) -> Refusals:
        """Replay the requests with deadlines around those waits, with refusals and without."""
        usual_s = statistics.median(each.waited_s or 0.0 for each in waits)
        service_s = statistics.median(
            (each.finished_s or 0.0) - (each.waited_s or 0.0) for each in waits if each.finished_s
        )
        rng = random.Random(self._seed)
        arrivals = [self._with_deadline(rng, each, usual_s, service_s) for each in self._arrivals]
        outcomes = self._run(arrivals)
        unrefused = self._run([replace(each, is_exempt=True) for each in arrivals])
        refused = [each for each in outcomes if each.is_refused]
        tried = [each for each in refused if each.arrival.is_exempt]
        pairs = zip(outcomes, unrefused, strict=True)
        accepted = [each for each in outcomes if not each.is_refused and each.arrival.patience_s == np.inf]
        return Refusals(
            len(outcomes),
            len(refused),
            len(tried),
            sum(each.is_in_time for each in tried),
            sum(each.is_refused and other.is_in_time for each, other in pairs),
            sum(not each.is_in_time for each in accepted),
        )

    def _run(self, arrivals: list[Arrival]) -> list[Outcome]:
        with self._engine.trial(self._workload, self._seed) as trial:
            trial.run(self._cold)
            is_noisy = self._workload.is_noisy
            noise: AbstractContextManager[None] = nullcontext()
            if is_noisy and isinstance(self._engine, RealEngine):
                noise = self._engine.noise(arrivals[-1].at_s)
            with noise:
                return trial.run(arrivals)

    @staticmethod
    def _with_deadline(rng: random.Random, arrival: Arrival, usual_s: float, service_s: float) -> Arrival:
        timeout_s = usual_s * rng.uniform(0.1, 2.0)
        is_exempt = rng.random() < EXEMPT_SHARE
        if rng.random() < 0.5:
            return replace(arrival, queue_timeout_s=timeout_s, is_exempt=is_exempt)
        return replace(arrival, timeout_s=timeout_s + service_s, is_exempt=is_exempt)


def errors(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the relative errors of the predictions, in percent."""
    return [100.0 * abs(each.predicted_s - each.waited_s) / each.waited_s for each in outcomes if each.waited_s]


def measure(num_repeats: int, model: Path | None, only: str, report: ReportProgress) -> list[Figure]:
    """Measure the engines whose names have `only` in them under all workloads, and a fleet under some."""
    figures: list[Figure] = []
    makers: dict[str, Callable[[], Engine]] = {
        "simulated": VirtualEngine,
        "model": lambda: RealEngine(model or find_checkpoint(None)),
    }
    for name, make in makers.items():
        if only in name:
            figures += _measure_engine(name, make(), num_repeats, report)
            figures += retries.measure(name, make(), num_repeats, report)
    if only in "fleet":
        figures += fleet.measure(num_repeats, model or find_checkpoint(None), report)
    return figures


def _measure_engine(name: str, engine: Engine, num_repeats: int, report: ReportProgress) -> Iterator[Figure]:
    total, everything = Refusals(), defaultdict[str, list[float]](list)
    for workload in WORKLOADS:
        samples: dict[str, list[float]] = defaultdict(list)
        for seed in range(num_repeats):
            scenario = Scenario(engine, workload, seed)
            waits = scenario.waits()
            total = total.plus(scenario.refusals(waits))
            found = errors(waits)
            everything["all"] += found
            samples["wait, median"].append(statistics.median(each.waited_s or 0.0 for each in waits))
            samples["error, p50"].append(float(np.percentile(found, 50)))
            samples["error, p90"].append(float(np.percentile(found, 90)))
        report(f"{name}, {workload.name}: " + ", ".join(f"{k} {statistics.median(v):.3g}" for k, v in samples.items()))
        subject = f"{name}: {workload.name}"
        yield Figure("wait, median", subject, "s", tuple(samples["wait, median"]))
        yield Figure("error, p50", subject, "%", tuple(samples["error, p50"]), Target(MEDIAN_TARGET))
        yield Figure("error, p90", subject, "%", tuple(samples["error, p90"]), Target(P90_TARGET))
    for percent, target in ((50, MEDIAN_TARGET), (90, P90_TARGET)):
        value = float(np.percentile(everything["all"], percent))
        yield Figure(f"error, p{percent}", f"{name}: all", "%", (value,), Target(target))
    yield Figure("refused", f"{name}: all", f"of {total.num_requests}", (total.num_refused,))
    yield Figure("accepted and late", f"{name}: all", f"of {total.num_requests}", (total.num_late,))
    for label, wrong, count in (
        ("refused but in time, alone served", total.num_wrong, total.num_tried),
        ("refused but in time, none refused", total.num_wrong_unrefused, total.num_refused),
    ):
        yield Figure(label, f"{name}: all", f"% of {count}", (100.0 * wrong / max(count, 1),), Target(WRONG_TARGET))


def _rate(outcomes: Sequence[Outcome]) -> float:
    """Return the requests a second that the engine serves, from the middle half of a burst."""
    ends = sorted(each.submitted_at + (each.finished_s or 0.0) for each in outcomes)
    quarter = len(ends) // 4
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])
