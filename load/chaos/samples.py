"""The sizes of the fleet's processes: before and after a run, and a sample a minute, which shows what grows."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import httpx
import numpy as np
import psutil

from sluice.load.chaos.fleet import ENGINE, PYTHON_WORKER, WORKER, Fleet, Gateway
from sluice.load.chaos.outcomes import Tally

_MORE_RSS, _MORE_RSS_MB = 1.5, 64.0
_MORE_THREADS, _MORE_DESCRIPTORS = 8, 32


@dataclass(frozen=True, slots=True)
class Size:
    """The resources of one part of the fleet: those of its largest process."""

    rss_mb: float = 0.0
    threads: int = 0
    descriptors: int = 0

    def joined(self, other: "Size") -> "Size":
        """Return the largest of each."""
        return Size(*(max(a, b) for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """The size of one process, and which part of the fleet that is."""

    part: str
    pid: int
    size: Size


def measure(fleet: Fleet) -> dict[str, Size]:
    """Return the size of each part of the fleet but for its stores."""
    sizes: dict[str, Size] = {}
    for each in _measure(_parts(fleet)):
        sizes[each.part] = sizes.get(each.part, Size()).joined(each.size)
    return sizes


def measure_processes(fleet: Fleet) -> list[ProcessSize]:
    """Return the size of each process of the fleet, and of Redis."""
    redis = fleet.redis
    stores = [] if redis is None or not redis.program.is_running else [("redis", psutil.Process(redis.program.pid))]
    return list(_measure((*_parts(fleet), *stores)))


def _measure(parts: Iterable[tuple[str, psutil.Process]]) -> Iterator[ProcessSize]:
    for part, process in parts:
        try:
            with process.oneshot():
                size = Size(round(process.memory_info().rss / 1e6, 1), process.num_threads(), process.num_fds())
        except psutil.Error:  # it has just ended
            continue
        yield ProcessSize(part, process.pid, size)


def _parts(fleet: Fleet) -> Iterator[tuple[str, psutil.Process]]:
    for gateway in fleet.gateways:
        if not gateway.program.is_running:
            continue
        yield f"gateway {gateway.name}", psutil.Process(gateway.program.pid)
        for word, part in ((ENGINE, "engine"), (WORKER, "worker"), (PYTHON_WORKER, "python model")):
            yield from ((f"{part} of {gateway.name}", each) for each in gateway.processes(word))
    for launcher in fleet.launchers:
        if launcher.is_running:
            yield launcher.name, psutil.Process(launcher.pid)
            yield from ((f"process of {launcher.name}", each) for each in launcher.children(ENGINE))


def find_growth(before: dict[str, Size], after: dict[str, Size]) -> list[str]:
    """Return the parts that have grown beyond the bound, or are gone. Pure.

    A part may have half as much memory again and 64 MB, 8 threads and 32 descriptors more than before the first fault.
    """
    found = [f"{part} is gone" for part in before.keys() - after.keys()]
    for part, size in after.items():
        first = before.get(part)
        if first is None:
            continue
        if size.rss_mb > first.rss_mb * _MORE_RSS + _MORE_RSS_MB:
            found.append(f"{part}: {first.rss_mb:.0f} MB have become {size.rss_mb:.0f}")
        if size.threads > first.threads + _MORE_THREADS:
            found.append(f"{part}: {first.threads} threads have become {size.threads}")
        if size.descriptors > first.descriptors + _MORE_DESCRIPTORS:
            found.append(f"{part}: {first.descriptors} descriptors have become {size.descriptors}")
    return found


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
class FleetSample:
    """The clients' counts and the sizes of everything at a moment of a run."""

    at_s: float
    """Seconds since the first sample."""
    requests: dict[str, int]
    """Ended requests, by outcome."""
    output_tokens: int
    processes: list[ProcessSize]
    gauges: dict[str, dict[str, float]]
    """Sums of the gauges of KV blocks and requests, by gateway; without one that did not answer."""


@dataclass(frozen=True, slots=True)
class Slope:
    """The growth of a process's memory after the first third of the run, and its lower bound by the spread of the
    samples."""

    part: str
    pid: int
    minutes: float
    mb_per_hour: float
    least_mb_per_hour: float


async def keep_sampling(fleet: Fleet, tally: Tally, samples: list[FleetSample], interval_s: float) -> None:
    """Add a sample every `interval_s` seconds until cancelled."""
    began = time.monotonic()
    while True:
        samples.append(await _take_sample(fleet, tally, time.monotonic() - began))
        await asyncio.sleep(interval_s)


def sample_interval_s(duration_s: float) -> float:
    """Return the seconds between two samples of a run. Pure."""
    return min(SAMPLE_S, duration_s / _LEAST_SAMPLES)


async def _take_sample(fleet: Fleet, tally: Tally, at_s: float) -> FleetSample:
    processes = await asyncio.to_thread(measure_processes, fleet)
    gauges = {each.name: found for each in fleet.gateways if (found := await _read_gauges(fleet, each)) is not None}
    requests = {str(outcome): count for outcome, count in tally.by_outcome().items()}
    return FleetSample(round(at_s, 1), requests, tally.num_output_tokens, processes, gauges)


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


def find_slopes(samples: Iterable[FleetSample]) -> list[Slope]:
    """Return the growth of memory of each process that lived long enough, the fastest first. Pure."""
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
    """Return the processes that grew steadily by more than 100 MB an hour over a quarter of an hour. Pure."""
    return [
        f"{each.part} (pid {each.pid}) grew by {each.mb_per_hour:.0f} MB an hour over {each.minutes:.0f} minutes"
        for each in slopes
        if each.minutes >= _JUDGED_MIN and each.least_mb_per_hour > _MOST_MB_AN_HOUR
    ]
