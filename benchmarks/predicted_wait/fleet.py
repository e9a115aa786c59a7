"""Predicted waits in a fleet of two engines on this machine, which share its cores: what the engine that took a request
had predicted for it, beside what came."""

import asyncio
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.predicted_wait.workloads import MAX_NUM_SEQS, WORKLOADS, Arrival, Workload
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.local import make_engine
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_COLD, NUM_REQUESTS = 128, 480
MIN_WAIT_S = 0.1
MEDIAN_TARGET = Target(15.0)
NAMES = ("bursts", "ramp", "mixed lengths, bursts", "mixed lengths, ramp", "shared prefixes")


class Wait(NamedTuple):
    """The predicted and the actual wait of a request in seconds, and the time of its end."""

    predicted_s: float
    actual_s: float
    ended_at: float


def measure(num_repeats: int, checkpoint: Path, report: ReportProgress) -> list[Figure]:
    """Measure each of NAMES with engines of its own."""
    figures: list[Figure] = []
    all_errors: list[float] = []
    for workload in (each for each in WORKLOADS if each.name in NAMES):
        samples: dict[str, list[float]] = defaultdict(list)
        for seed in range(num_repeats):
            waits = [each for each in asyncio.run(_run(checkpoint, workload, seed)) if each.actual_s >= MIN_WAIT_S]
            errors = [100.0 * abs(each.predicted_s - each.actual_s) / each.actual_s for each in waits]
            all_errors += errors
            samples["wait, median"].append(statistics.median(each.actual_s for each in waits))
            samples["error, p50"].append(float(np.percentile(errors, 50)))
            samples["error, p90"].append(float(np.percentile(errors, 90)))
        subject = f"fleet: {workload.name}"
        report(f"{subject}: " + ", ".join(f"{name} {statistics.median(each):.3g}" for name, each in samples.items()))
        figures.append(Figure("wait, median", subject, "s", tuple(samples["wait, median"])))
        figures.append(Figure("error, p50", subject, "%", tuple(samples["error, p50"]), MEDIAN_TARGET))
        figures.append(Figure("error, p90", subject, "%", tuple(samples["error, p90"])))
    for percent, target in ((50, MEDIAN_TARGET), (90, None)):
        value = float(np.percentile(all_errors, percent))
        figures.append(Figure(f"error, p{percent}", "fleet: all", "%", (value,), target))
    return figures


async def _run(checkpoint: Path, workload: Workload, seed: int) -> list[Wait]:
    """Serve a burst, which tells what the fleet can do, and then the workload. Returns the latter's waits."""
    config = EngineConfig(
        model_path=str(checkpoint), num_blocks=workload.num_blocks, max_num_seqs=MAX_NUM_SEQS, max_queued_requests=2048
    )
    client = make_engine(config, 2)
    assert isinstance(client, FleetClient)
    rng, numbers = random.Random(seed), count()
    await client.start()
    try:
        cold = await asyncio.gather(*(_serve(client, workload.mix(rng), next(numbers)) for _ in range(NUM_COLD)))
        arrivals = workload.arrivals(rng, NUM_REQUESTS, _rate(cold))
        started, serving = perf_counter(), list[asyncio.Task[Wait]]()
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, started + arrival.at_s - perf_counter()))
            serving.append(asyncio.create_task(_serve(client, arrival, next(numbers))))
        return await asyncio.gather(*serving)
    finally:
        await client.stop()


def _rate(waits: Sequence[Wait]) -> float:
    """Return the requests a second of the middle half of a burst."""
    ends = sorted(each.ended_at for each in waits)
    quarter = len(ends) // 4
    return 2 * quarter / (ends[3 * quarter] - ends[quarter])


async def _serve(client: FleetClient, arrival: Arrival, number: int) -> Wait:
    """Read a request's stream until it has as many tokens as it needs, and leave it."""
    sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        request_id=str(number), prompt_token_ids=list(arrival.prompt), sampling=sampling, returns_metrics=True
    )
    stream = client.submit(request)
    metrics = None
    try:
        async for event in stream:
            if event.detail is not None and event.detail.metrics is not None:
                metrics = event.detail.metrics
            if len(stream.output_token_ids) >= arrival.length:
                break
    finally:
        stream.cancel()
    if metrics is None:
        raise BenchmarkError("an engine told nothing of a request's wait")
    return Wait(metrics.predicted_queue_s, metrics.queue_s, perf_counter())
