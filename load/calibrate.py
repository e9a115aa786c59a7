"""`sluice load --calibrate`: measures what a server's steps cost, for `sluice simulate`.

Requests alone, with prompts of several lengths, tell what the tokens of a prompt take. Crowds of several sizes and
lengths, whose answers come side by side, tell what a step takes for each sequence and for each token before it.
"""

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.load.config import LoadConfig, RequestPace, TokenRange
from sluice.load.run import Run, RunError, read_machine_info, run_load
from sluice.load.stream import RequestResult

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
CROWDS = (1, 2, 4, 8, 16, 32, 64)
SHORT_PROMPT, OUTPUT = 16, 64
NUM_ROUNDS, NUM_ALONE, _LEAST_REQUESTS = 5, 3, 4
"""Rounds over all sizes, the requests of each length of prompts in a round, and those of a small crowd."""
_LEAST_EVENTS = 4
"""Gaps between events, of which fewer are too few to leave out the others."""
COST_NAMES = ("step_s", "prefill_token_s", "decode_seq_s", "context_token_s", "attention_s", "request_s")

Floats = NDArray[np.float64]
Runner = Callable[[LoadConfig], Coroutine[Any, Any, Run]]


@dataclass(frozen=True, slots=True)
class CalibrationMeasurement:
    """Seconds that were measured, and how often they have each of COST_NAMES."""

    seconds: float
    factors: tuple[float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """The costs by COST_NAMES, and how far they are off what was measured."""

    model: str
    costs: dict[str, float]
    median_error: float
    worst_error: float
    """Relative to what was measured."""
    num_measurements: int

    def to_json(self) -> bytes:
        """Encode the costs as `sluice simulate --costs` reads them."""
        machine = read_machine_info()
        document = {
            "name": self.model,
            "machine": f"{machine['processor']}, {machine['num_cores']} cores",
            "costs": {name: value for name, value in self.costs.items() if name != "request_s"},
            "request_s": self.costs["request_s"],
        }
        return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def calibrate_blocking(config: LoadConfig, longest: int, most: int, report: Callable[[str], None]) -> CalibrationRun:
    """Measure the server of `config`, with prompts of up to `longest` tokens and up to `most` requests at a time.
    Raises RunError where a request fails."""
    return asyncio.run(calibrate(config, longest, most, report))


async def calibrate(
    config: LoadConfig, longest: int, most: int, report: Callable[[str], None], runner: Runner = run_load
) -> CalibrationRun:
    """Measure as `calibrate_blocking` does, in a running event loop. `runner` makes a run."""
    sizes = sorted({*(each for each in PROMPTS if each < longest), longest})
    crowds = [
        (crowd, prompt)
        for prompt in sorted({SHORT_PROMPT, max(SHORT_PROMPT, longest // 2)})
        for crowd in CROWDS
        if crowd <= most
    ]
    ttfts_s: dict[int, list[float]] = {size: [] for size in sizes}
    steps_s: dict[tuple[int, int], list[float]] = {crowd: [] for crowd in crowds}
    model = ""
    # Each round has all sizes: where the machine is slower for a while, that is a part of the samples of each.
    for number in range(NUM_ROUNDS):
        for size in sizes:
            report(f"round {number + 1} of {NUM_ROUNDS}: prompts of {size} tokens, one at a time")
            run = await _run(runner, config, number, concurrency=1, num_requests=NUM_ALONE, prompt=size, output=2)
            model = run.model
            ttfts_s[size] += [r.ttft_s for r in run.results if r.ttft_s is not None]
        for crowd, prompt in crowds:
            report(f"round {number + 1} of {NUM_ROUNDS}: {crowd} at a time, prompts of {prompt} tokens")
            run = await _run(
                runner,
                config,
                number,
                concurrency=crowd,
                num_requests=max(crowd, _LEAST_REQUESTS),
                prompt=prompt,
                output=OUTPUT,
            )
            steps_s[crowd, prompt].append(_step_s(run))
    alone = [
        CalibrationMeasurement(statistics.median(ttfts_s[size]), (1.0, float(size), 0.0, 0.0, size * (size // 2), 1.0))
        for size in sizes
    ]
    together = [
        CalibrationMeasurement(statistics.median(steps_s[crowd, prompt]), _factors(crowd, prompt))
        for crowd, prompt in crowds
    ]
    return fit(model, alone + together)


async def _run(
    runner: Runner, config: LoadConfig, number: int, *, concurrency: int, num_requests: int, prompt: int, output: int
) -> Run:
    # Each run has other prompts, so that none is found in a cache.
    seed = config.workload.seed + 1_000_003 * number + 10_007 * prompt + 101 * output + concurrency
    workload = replace(
        config.workload,
        prompt_tokens=TokenRange(prompt, prompt),
        output_tokens=TokenRange(output, output),
        seed=seed,
    )
    pace = RequestPace(concurrency=concurrency, num_requests=num_requests, warmup=1)
    run = await runner(replace(config, workload=workload, pace=pace))
    for result in run.results:
        if result.failure is not None:
            raise RunError(f"a request failed: {result.failure.label}: {result.failure.detail}")
    return run


def _step_s(run: Run) -> float:
    """Return the seconds of a step in the middle half of the answers, where all of the crowd decode; of an answer in a
    few events, in all of it."""
    steps = [step_s for result in run.results for step_s in _middle_step(result)]
    if not steps:
        raise RunError("no answer has enough events to tell what a step takes: the server merges tokens")
    return statistics.median(steps)


def _factors(crowd: int, prompt: int) -> tuple[float, float, float, float, float, float]:
    """Return the factor of each of COST_NAMES in such a step."""
    return 1.0, 0.0, float(crowd), crowd * (prompt + OUTPUT / 2), 0.0, 0.0


def _middle_step(result: RequestResult) -> Iterator[float]:
    times = result.event_times_s
    first, last = len(times) // 4, 3 * len(times) // 4
    if last - first < _LEAST_EVENTS:  # the server merges tokens
        first, last = 0, len(times) - 1
    if last <= first or result.output_tokens < 2:
        return
    tokens_per_event = result.output_tokens / len(times)
    yield (times[last] - times[first]) / (last - first) / tokens_per_event


def fit(model: str, measured: list[CalibrationMeasurement]) -> CalibrationRun:
    """Return the costs, none below 0, whose sums are closest to what was measured, relative to it."""
    seconds = np.array([each.seconds for each in measured])
    factors = np.array([each.factors for each in measured], float)
    scales = np.maximum(factors.max(axis=0), 1e-12)
    weighted = factors / scales / seconds[:, None]
    costs = _least_squares(weighted, np.ones(len(seconds))) / scales
    errors = np.abs(factors @ costs - seconds) / seconds
    return CalibrationRun(
        model=model,
        costs=dict(zip(COST_NAMES, costs.tolist(), strict=True)),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        num_measurements=len(measured),
    )


def _least_squares(factors: Floats, targets: Floats) -> Floats:
    """Return the least squares that are not negative: Lawson and Hanson's active sets, by leaving out what is."""
    costs = np.zeros(factors.shape[1])
    used = list(range(factors.shape[1]))
    while used:
        found = np.linalg.lstsq(factors[:, used], targets, rcond=None)[0]
        if found.min() >= 0.0:
            costs[used] = found
            break
        used.pop(int(found.argmin()))
    return costs
