"""Samples of the fleet while it is under traffic, and whether the memory of a process grows steadily."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
import numpy as np

from sluice.load.chaos.fleet import Fleet, Gateway
from sluice.load.chaos.measurements import ProcessSize, measure_processes
from sluice.load.chaos.outcomes import Tally

SAMPLE_S = 60.0
_LEAST_SAMPLES = 10
"""A run has at least so many samples, however short it is."""
_WARMING_PART = 1 / 3
"""The first part of a process' life, in which it may grow: caches fill, and libraries reserve memory."""
_LEAST_FITTED = 8
_JUDGED_MIN = 15.0
"""Shorter observations say nothing of an hour."""
_MOST_MB_AN_HOUR = 100.0
_GAUGES = {
    "sluice_kv_blocks": "blocks",
    "sluice_kv_blocks_free": "blocks_free",
    "sluice_kv_blocks_used": "blocks_used",
    "sluice_kv_blocks_reserved": "blocks_reserved",
    "sluice_sequences_running": "running",
    "sluice_sequences_waiting": "waiting",
    "sluice_open_requests": "open_requests",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The clients' counts and the sizes of everything at a moment of a run."""

    at_s: float
    """Seconds since the first sample."""
    requests: dict[str, int]
    """How many requests had ended, by outcome."""
    output_tokens: int
    processes: list[ProcessSize]
    gauges: dict[str, dict[str, float]]
    """Sums of the gauges of KV blocks and requests, by gateway; without one that did not answer."""


@dataclass(frozen=True, slots=True)
class Slope:
    """How the memory of a process grew after its first third, and at least, by the spread of the samples."""

    part: str
    pid: int
    minutes: float
    mb_per_hour: float
    least_mb_per_hour: float


async def keep_sampling(fleet: Fleet, tally: Tally, samples: list[Sample], interval_s: float) -> None:
    """Add a sample every `interval_s` seconds until cancelled."""
    began = time.monotonic()
    while True:
        samples.append(await _take_sample(fleet, tally, time.monotonic() - began))
        await asyncio.sleep(interval_s)


def sample_interval_s(duration_s: float) -> float:
    """Return the seconds between two samples of a run. Pure."""
    return min(SAMPLE_S, duration_s / _LEAST_SAMPLES)


async def _take_sample(fleet: Fleet, tally: Tally, at_s: float) -> Sample:
    processes = await asyncio.to_thread(measure_processes, fleet)
    gauges = {each.name: found for each in fleet.gateways if (found := await _read_gauges(fleet, each)) is not None}
    requests = {str(outcome): count for outcome, count in tally.by_outcome().items()}
    return Sample(round(at_s, 1), requests, tally.num_output_tokens, processes, gauges)


async def _read_gauges(fleet: Fleet, gateway: Gateway) -> dict[str, float] | None:
    try:
        return sum_gauges(await fleet.metrics(gateway))
    except (httpx.HTTPError, ValueError):
        return None


def sum_gauges(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the gauges of a gateway's metrics, summed over models and replicas. Pure."""
    found: dict[str, float] = dict.fromkeys(_GAUGES.values(), 0.0)
    for key, value in metrics.items():
        if (name := _GAUGES.get(key.partition("{")[0])) is not None:
            found[name] += value
    return found


def find_slopes(samples: Iterable[Sample]) -> list[Slope]:
    """Return how the memory of each process grew that was there for long enough, the fastest first. Pure."""
    lives: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for each in sample.processes:
            lives[each.part, each.pid].append((sample.at_s, each.size.rss_mb))
    slopes = (_fit(part, pid, points) for (part, pid), points in lives.items())
    found = [each for each in slopes if each is not None]
    return sorted(found, key=lambda each: each.mb_per_hour, reverse=True)


def _fit(part: str, pid: int, points: list[tuple[float, float]]) -> Slope | None:
    settled = points[int(len(points) * _WARMING_PART) :]
    if len(settled) < _LEAST_FITTED:
        return None
    hours, sizes_mb = np.array(settled).T / np.array([[3600.0], [1.0]])
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    slope = float(centred @ sizes_mb) / spread
    residuals = sizes_mb - sizes_mb.mean() - slope * centred
    deviation = float(np.sqrt(residuals @ residuals / (len(settled) - 2) / spread))
    minutes = float(hours[-1] - hours[0]) * 60
    return Slope(part, pid, round(minutes, 1), round(slope, 1), round(slope - 2 * deviation, 1))


def find_leaks(slopes: Iterable[Slope]) -> list[str]:
    """Say which processes grew steadily by more than the bound, 100 MB an hour, over a quarter of an hour. Pure."""
    return [
        f"{each.part} (pid {each.pid}) grew by {each.mb_per_hour:.0f} MB an hour over {each.minutes:.0f} minutes"
        for each in slopes
        if each.minutes >= _JUDGED_MIN and each.least_mb_per_hour > _MOST_MB_AN_HOUR
    ]
