"""Fairness between tenants: the time to first token of one request behind a hundred of another tenant."""

import random
from pathlib import Path

from benchmarks.figures import Figure, Target
from benchmarks.scheduling.trace import TimedRequest, replay
from sluice.engine.config import EngineConfig
from sluice.engine.loop.load import load_runner
from sluice.engine.runners.base import Runner
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_REQUESTS, LATE_S = 100, 0.2
MAX_NUM_SEQS, PROMPT_TOKENS, MAX_TOKENS = 8, 32, 32
TARGET_SHARE = Target(0.25)
"""Its time over that of a request behind a hundred of the same tenant."""


def measure(num_repeats: int, checkpoint: Path) -> list[Figure]:
    """Measure both in each repeat, one after the other."""
    config = EngineConfig(model_path=str(checkpoint), num_blocks=64, max_num_seqs=MAX_NUM_SEQS)
    runner = load_runner(config)
    try:
        pairs = [(_ttft_s(runner, config, "one"), _ttft_s(runner, config, "many")) for _ in range(num_repeats)]
    finally:
        runner.close()
    name = f"TTFT of one request behind {NUM_REQUESTS}"
    return [
        Figure(name, "a tenant of its own", "s", tuple(fair for fair, _ in pairs)),
        Figure(name, "the same tenant", "s", tuple(behind for _, behind in pairs)),
        Figure(name, "own / same", "x", tuple(fair / behind for fair, behind in pairs), TARGET_SHARE),
    ]


def _ttft_s(runner: Runner, config: EngineConfig, tenant: str) -> float:
    trace = [TimedRequest(0.0, _request(number, "many")) for number in range(NUM_REQUESTS)]
    trace.append(TimedRequest(LATE_S, _request(NUM_REQUESTS, tenant)))
    return replay(runner, config, trace).outcomes[-1].ttft_s


def _request(number: int, tenant: str) -> GenerateRequest:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    prompt = random.Random(number).choices(range(100, 4000), k=PROMPT_TOKENS)
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params, tenant=tenant)
