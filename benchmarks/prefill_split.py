"""Running streams while long prompts arrive, on two engines: with a prefill replica, and with two that do both.

The prompts come at random times, at a rate that one engine can compute alone. Their answers are greedy, and must be the
same in both cases."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.figures import Figure, ReportProgress, Target
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.handover import HandoverOutcome
from sluice.engine.fleet.local import make_engine
from sluice.engine.types import GenerateRequest, SamplingParams
from sluice.gateway.checkpoint import find_checkpoint

NUM_STREAMS, STREAM_TOKENS = 4, 300
LONG_TOKENS, LONG_OUTPUT, LONG_EVERY_S, NUM_LONG = 900, 8, 0.5, 16
MIN_SPLIT_TOKENS = 256
SUBJECTS = {"two that do both": 0, "one prefill replica": 1}
"""The subjects, each with its number of prefill replicas of two."""


@dataclass(slots=True)
class Run:
    """The measurements of one run, in seconds, what was answered to the long prompts, and how many were handed over."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two events of a running stream."""
    ttfts_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    num_handed_over: int = 0
    num_late: int = 0
    """Prompts that were computed after all, because their blocks did not come in time."""


def measure(num_repeats: int, model: Path | None, report: ReportProgress) -> list[Figure]:
    """Measure the bundled model, or the checkpoint `model`, with the subjects in turns. Computing the long prompts of a
    larger one takes longer than they take to arrive."""
    config = EngineConfig(model_path=str(model or find_checkpoint(None)), num_blocks=600, max_model_len=1024)
    runs: dict[str, list[Run]] = {subject: [] for subject in SUBJECTS}
    for repeat in range(num_repeats):
        for subject, num_prefill in SUBJECTS.items():
            run = asyncio.run(_measure_one(config, num_prefill, repeat))
            runs[subject].append(run)
            gap_ms = 1000 * float(np.percentile(run.gaps_s, 99))
            report(f"repeat {repeat + 1} of {num_repeats}, {subject}: ITL p99 {gap_ms:.1f} ms")
    whole, split = runs.values()
    same = tuple(float(_num_same(a.answers, b.answers)) for a, b in zip(whole, split, strict=True))
    equality = Figure(
        f"answers of {NUM_LONG} that are the same", "both ways", "", same, Target(NUM_LONG, is_ceiling=False)
    )
    return [*(figure for subject in SUBJECTS for figure in _figures(subject, runs[subject])), equality]


def _num_same(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=True))


def _figures(subject: str, runs: list[Run]) -> Iterator[Figure]:
    for share in (50, 99):
        values = tuple(1000 * float(np.percentile(run.gaps_s, share)) for run in runs)
        yield Figure(f"ITL of running streams, p{share}", subject, "ms", values)
    yield Figure("longest gap", subject, "ms", tuple(1000 * max(run.gaps_s) for run in runs))
    yield Figure("TTFT of a long prompt", subject, "ms", tuple(1000 * float(np.median(run.ttfts_s)) for run in runs))
    yield Figure("prompts handed over", subject, "", tuple(float(run.num_handed_over) for run in runs))
    yield Figure("of those, computed again", subject, "", tuple(float(run.num_late) for run in runs))


async def _measure_one(config: EngineConfig, num_prefill: int, seed: int) -> Run:
    client = make_engine(config, 2, num_prefill=num_prefill, min_split_tokens=MIN_SPLIT_TOKENS)
    assert isinstance(client, FleetClient)
    numbers, run = random.Random(seed), Run()
    await client.start()
    try:
        await _warm_up(client, numbers)
        others = random.Random(seed + 1)  # streams begin when others end, which is at another time in each run
        streaming = [asyncio.create_task(_stream(client, others, run)) for _ in range(NUM_STREAMS)]
        arrivals = []
        for _ in range(NUM_LONG):
            arrivals.append(asyncio.create_task(_answer(client, _request(numbers, LONG_TOKENS, LONG_OUTPUT), run)))
            await asyncio.sleep(numbers.expovariate(1.0 / LONG_EVERY_S))
        run.answers = list(await asyncio.gather(*arrivals))
        for task in streaming:
            task.cancel()
        run.num_handed_over = client.handover.outcomes[HandoverOutcome.HANDED_OVER]
        run.num_late = 0 if client.stats.handover is None else client.stats.handover.late_total
    finally:
        await client.stop()
    return run


async def _stream(client: FleetClient, numbers: random.Random, run: Run) -> None:
    """Run one stream after the other, until cancelled."""
    while True:
        last = 0.0
        async for _ in client.submit(_request(numbers, 16, STREAM_TOKENS)):
            now = perf_counter()
            if last:
                run.gaps_s.append(now - last)
            last = now


async def _warm_up(client: FleetClient, numbers: random.Random) -> None:
    """Warm up each replica with prompts of both kinds: it compiles its kernels and learns its pace."""
    for num_tokens in (16, LONG_TOKENS, LONG_TOKENS):
        for each in client.replicas:
            async for _ in each.engine.submit(_request(numbers, num_tokens, 8)):
                pass


def _request(numbers: random.Random, num_tokens: int, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompt = numbers.choices(range(100, 4000), k=num_tokens)
    return GenerateRequest(request_id="", prompt_token_ids=prompt, sampling=sampling)


async def _answer(client: FleetClient, request: GenerateRequest, run: Run) -> list[int]:
    """Note the time to the first token, and return all."""
    started, tokens = perf_counter(), list[int]()
    async for event in client.submit(request):
        if not tokens:
            run.ttfts_s.append(perf_counter() - started)
        tokens += event.token_ids
    return tokens
