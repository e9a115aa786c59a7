"""The cost of a long queue: the time of a step of 64 sequences while none, or up to 100,000, wait.

More sequences could run but for the lack of blocks, so that each step checks the head of the queue again.
"""

import time
from itertools import islice

from benchmarks.executor import NullRunner
from benchmarks.figures import BenchmarkError, Figure, Target
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Command, Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_RUNNING, NUM_TENANTS = 64, 10
NUM_WAITING = (10_000, 100_000)
MAX_NUM_SEQS = 2 * NUM_RUNNING
NUM_STEPS, PROMPT_TOKENS = 300, 64
MAX_TOKENS = 2048 - PROMPT_TOKENS
"""With so many tokens NUM_RUNNING sequences reserve all blocks of the NullRunner."""
TARGET_RATIO = Target(2.0)


class _Commands:
    """A source of commands that returns those put into it."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def receive(self, timeout_s: float) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands


def measure(num_repeats: int, lengths: tuple[int, ...] = NUM_WAITING, num_steps: int = NUM_STEPS) -> list[Figure]:
    """Measure all lengths in turn, and for each repeat their ratio to an empty queue."""
    times = [{waiting: _step_ms(waiting, num_steps) for waiting in (0, *lengths)} for _ in range(num_repeats)]
    name = f"executor step, {NUM_RUNNING} running"
    return [
        Figure(name, "none waiting", "ms", tuple(each[0] for each in times)),
        *(Figure(name, f"{waiting:,} waiting", "ms", tuple(each[waiting] for each in times)) for waiting in lengths),
        *(
            Figure(name, f"{waiting:,} / none", "x", tuple(each[waiting] / each[0] for each in times), TARGET_RATIO)
            for waiting in lengths
        ),
    ]


def _step_ms(num_waiting: int, num_steps: int) -> float:
    """Return the mean milliseconds of a decode step without the runner's time."""
    commands = _Commands()
    config = EngineConfig(model_path="", max_num_seqs=MAX_NUM_SEQS, max_queued_requests=num_waiting)
    executor = InflightExecutor(NullRunner(), config, commands.receive, lambda frame: None)
    requests = (_request(number) for number in range(NUM_RUNNING + num_waiting))
    commands.commands = [Submit(number, request) for number, request in enumerate(islice(requests, NUM_RUNNING))]
    while executor.stats().prompt_tokens_total < NUM_RUNNING * PROMPT_TOKENS:
        executor.step()
    commands.commands = [Submit(NUM_RUNNING + number, request) for number, request in enumerate(requests)]
    while executor.stats().num_waiting < num_waiting:  # a burst enters the queue over several steps
        executor.step()
    before, started = executor.stats(), time.perf_counter()
    for _ in range(num_steps):
        executor.step()
    elapsed_s, after = time.perf_counter() - started, executor.stats()
    if (after.num_running, after.num_waiting) != (NUM_RUNNING, num_waiting):
        raise BenchmarkError(f"{after.num_running} ran and {after.num_waiting} waited")
    return (elapsed_s - (after.runner_seconds_total - before.runner_seconds_total)) * 1e3 / num_steps


def _request(number: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    prompt = [number % 8192, *range(1, PROMPT_TOKENS)]
    tenant = str(number % NUM_TENANTS)
    return GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params, tenant=tenant)
