"""Running streams while long prompts arrive, on two engines: with a prefill replica, and with two that do both."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.figures import Figure, ReportProgress
from benchmarks.models import build_m
from engine.client.stream import GenerationStream
from engine.config import EngineConfig
from engine.fleet.client import FleetClient
from engine.fleet.handover import HandoverOutcome
from engine.fleet.local import make_engine
from engine.types import GenerateRequest, SamplingParams
from gateway.checkpoint import find_checkpoint

NUM_STREAMS, STREAM_TOKENS = 4, 300
LONG_TOKENS, LONG_OUTPUT, LONG_EVERY_S, NUM_LONG = 900, 4, 1.0, 16
MIN_SPLIT_TOKENS = 256
SUBJECTS = {"two that do both": 0, "one prefill replica": 1}
"""The subjects, each with its number of prefill replicas of two."""


@dataclass(slots=True)
class Run:
    """The measurements of one run, in seconds, and how many prompts were handed over."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two events of a running stream."""
    ttfts_s: list[float] = field(default_factory=list)
    num_handed_over: int = 0


def measure(num_repeats: int, out: Path, model: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure model M, or the checkpoint `model`, with the subjects in turns."""
    checkpoint = model or build_m(out.resolve() / "models", find_checkpoint(None))
    config = EngineConfig(model_path=str(checkpoint), num_blocks=600, max_model_len=1024)
    runs: dict[str, list[Run]] = {subject: [] for subject in SUBJECTS}
    for repeat in range(num_repeats):
        for subject, num_prefill in SUBJECTS.items():
            report(f"repeat {repeat + 1} of {num_repeats}: {subject}")
            runs[subject].append(asyncio.run(_measure_one(config, num_prefill, repeat)))
    return [figure for subject in SUBJECTS for figure in _figures(subject, runs[subject])]


def _figures(subject: str, runs: list[Run]) -> Iterator[Figure]:
    for share in (50, 99):
        values = tuple(1000 * float(np.percentile(run.gaps_s, share)) for run in runs)
        yield Figure(f"ITL of running streams, p{share}", subject, "ms", values)
    yield Figure("longest gap", subject, "ms", tuple(1000 * max(run.gaps_s) for run in runs))
    yield Figure("TTFT of a long prompt", subject, "ms", tuple(1000 * float(np.median(run.ttfts_s)) for run in runs))
    yield Figure("prompts handed over", subject, "", tuple(float(run.num_handed_over) for run in runs))


async def _measure_one(config: EngineConfig, num_prefill: int, seed: int) -> Run:
    client = make_engine(config, 2, num_prefill=num_prefill, min_split_tokens=MIN_SPLIT_TOKENS)
    assert isinstance(client, FleetClient)
    numbers, run = random.Random(seed), Run()
    await client.start()
    try:
        await _warm_up(client, numbers)
        streaming = [asyncio.create_task(_stream(client, numbers, run)) for _ in range(NUM_STREAMS)]
        arrivals = []
        for _ in range(NUM_LONG):
            arrivals.append(asyncio.create_task(_ttft(client, _request(numbers, LONG_TOKENS, LONG_OUTPUT))))
            await asyncio.sleep(LONG_EVERY_S)
        run.ttfts_s = list(await asyncio.gather(*arrivals))
        for task in streaming:
            task.cancel()
        run.num_handed_over = client.handover.outcomes[HandoverOutcome.HANDED_OVER]
    finally:
        await client.stop()
    return run


async def _stream(client: FleetClient, numbers: random.Random, run: Run) -> None:
    """Have one stream after the other, until cancelled."""
    while True:
        last = 0.0
        async for _ in client.submit(_request(numbers, 16, STREAM_TOKENS)):
            now = perf_counter()
            if last:
                run.gaps_s.append(now - last)
            last = now


async def _warm_up(client: FleetClient, numbers: random.Random) -> None:
    """Have each replica compute prompts of both kinds, so that it has compiled what it needs and knows its pace."""
    for num_tokens in (16, LONG_TOKENS, LONG_TOKENS):
        for each in client.replicas:
            await _read(each.engine.submit(_request(numbers, num_tokens, 8)))


def _request(numbers: random.Random, num_tokens: int, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = numbers.choices(range(100, 4000), k=num_tokens)
    return GenerateRequest(request_id="", prompt_token_ids=prompt, sampling=sampling)


async def _read(stream: GenerationStream) -> list[float]:
    """Return the times of its events."""
    return [perf_counter() async for _ in stream]


async def _ttft(client: FleetClient, request: GenerateRequest) -> float:
    started = perf_counter()
    return (await _read(client.submit(request)))[0] - started
