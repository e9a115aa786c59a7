"""Overload under each scheduler policy, on one trace: throughput, latencies, preemptions, and the forecast of waits.

Prompts are random. A sequence ends by itself at one of a set of stop tokens, on average long before its `max_tokens`,
where reserving for the worst case and preempting differ most.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.scheduling.trace import Replay, TimedRequest, percentile, replay
from sluice.engine.config import EngineConfig, SchedulerPolicy
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.base import Runner
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_REQUESTS = 160
OVERLOAD = 4.0
"""Rate of arrival over the rate of service where the worst case is reserved."""
NUM_BLOCKS, MAX_NUM_SEQS = 32, 32
VOCABULARY, STOP_EVERY = 4096, 64
PROMPT_TOKENS, MAX_TOKENS = (16, 64), 192
NUM_WARM_UP = 40
"""Number of requests that arrive at once. The forecast learns from them and is judged by the others."""
MIN_WAIT_S = 0.05
"""Least wait that is judged: shorter ones last a few steps."""

ANSWERS = "answers as under guaranteed_no_evict"
UNITS = {
    "output": "tokens/s",
    "TTFT p50": "ms",
    "TTFT p99": "ms",
    "ITL p50": "ms",
    "ITL p99": "ms",
    "preemptions": "",
    "recomputed tokens": "",
    ANSWERS: f"of {NUM_REQUESTS}",
    "wait, median": "s",
    "wait predicted, relative error p50": "%",
    "wait predicted, relative error p90": "%",
}
TARGETS = {
    ("preemptions", SchedulerPolicy.GUARANTEED_NO_EVICT): Target(0),
    ("recomputed tokens", SchedulerPolicy.GUARANTEED_NO_EVICT): Target(0),
    ("preemptions", SchedulerPolicy.MAX_UTILIZATION): Target(1, is_ceiling=False),
    ("wait predicted, relative error p50", SchedulerPolicy.GUARANTEED_NO_EVICT): Target(25),
    (ANSWERS, SchedulerPolicy.MAX_UTILIZATION): Target(NUM_REQUESTS, is_ceiling=False),
}


def measure(num_repeats: int, checkpoint: Path) -> list[Figure]:
    """Replay a trace under all policies in turn, in each repeat."""
    # In float32 the last digits still depend on how many tokens share a step: of tens of thousands of tokens
    # sampled at temperature 1, one may come out different.
    config = EngineConfig(
        model_path=str(checkpoint),
        dtype="f32",
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        max_queued_requests=NUM_REQUESTS,
        enable_prefix_caching=False,
    )
    runner = load_runner(config)
    samples: dict[tuple[str, SchedulerPolicy], list[float]] = defaultdict(list)
    try:
        for repeat in range(num_repeats):
            for key, value in _compare(runner, config, random.Random(repeat)):
                samples[key].append(value)
    finally:
        runner.close()
    return [
        Figure(name, policy, UNITS[name], tuple(values), TARGETS.get((name, policy)))
        for (name, policy), values in samples.items()
    ]


def _compare(
    runner: Runner, config: EngineConfig, rng: random.Random
) -> Iterator[tuple[tuple[str, SchedulerPolicy], float]]:
    requests = [_request(rng, number) for number in range(NUM_REQUESTS)]
    warm_up = [TimedRequest(0.0, request) for request in requests[:NUM_WARM_UP]]
    at_s = replay(runner, config, warm_up).seconds
    rate = OVERLOAD * NUM_WARM_UP / at_s
    trace = list(warm_up)
    for request in requests[NUM_WARM_UP:]:
        trace.append(TimedRequest(at_s, request))
        at_s += rng.expovariate(rate)
    expected: list[list[int]] = []
    for policy in SchedulerPolicy:
        run = replay(runner, msgspec.structs.replace(config, scheduler_policy=policy), trace)
        answers = [outcome.token_ids for outcome in run.outcomes]
        expected = expected or answers
        num_same = sum(answer == other for answer, other in zip(answers, expected, strict=True))
        for name, value in (*_figures(run), (ANSWERS, num_same), *_forecast(run)):
            yield (name, policy), value


def _figures(run: Replay) -> Iterator[tuple[str, float]]:
    yield "output", run.tokens_per_s
    for percent in (50, 99):
        yield f"TTFT p{percent}", run.ttft_ms(percent)
    for percent in (50, 99):
        yield f"ITL p{percent}", run.itl_ms(percent)
    yield "preemptions", run.stats.preemptions_total
    yield "recomputed tokens", run.stats.recomputed_tokens_total


def _forecast(run: Replay) -> Iterator[tuple[str, float]]:
    judged = [wait for wait in run.waits[NUM_WARM_UP:] if wait.actual_s >= MIN_WAIT_S]
    if not judged:
        raise BenchmarkError("no request waited: there was no overload")
    errors = [abs(wait.predicted_s - wait.actual_s) / wait.actual_s for wait in judged]
    yield "wait, median", percentile([wait.actual_s for wait in judged], 50)
    yield "wait predicted, relative error p50", 100 * percentile(errors, 50)
    yield "wait predicted, relative error p90", 100 * percentile(errors, 90)


def _request(rng: random.Random, number: int) -> GenerateRequest:
    params = SamplingParams(
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        seed=number,
        ignore_eos=True,
        stop_token_ids=tuple(range(number % STOP_EVERY, VOCABULARY, STOP_EVERY)),
    )
    prompt = rng.choices(range(100, VOCABULARY), k=rng.randint(*PROMPT_TOKENS))
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
